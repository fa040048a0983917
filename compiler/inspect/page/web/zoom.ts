// Pan and zoom of one view: drag, wheel, pinch, and animated jumps.

import { framed } from "./dom";

const [LEAST, MOST] = [0.02, 3];

export class Zoom {
  x = 0;
  y = 0;
  scale = 1;
  private flight = 0;
  private readonly fingers = new Map<number, PointerEvent>();
  private readonly moved: () => void;
  /** whether the last press was a drag, so that the click at its end is none */
  dragged = false;

  constructor(
    private readonly surface: Element,
    draw: () => void,
  ) {
    this.moved = framed(draw);
    surface.addEventListener("wheel", (event) => this.wheel(event as WheelEvent), { passive: false });
    surface.addEventListener("pointerdown", (event) => this.down(event as PointerEvent));
    surface.addEventListener("pointermove", (event) => this.move(event as PointerEvent));
    for (const name of ["pointerup", "pointercancel"] as const) {
      surface.addEventListener(name, (event) => this.fingers.delete((event as PointerEvent).pointerId));
    }
  }

  private wheel(event: WheelEvent): void {
    event.preventDefault();
    const box = this.surface.getBoundingClientRect();
    if (event.shiftKey) return this.by(-event.deltaY, 0);
    this.around(event.clientX - box.left, event.clientY - box.top, Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0016)));
  }

  private down(event: PointerEvent): void {
    if (event.button !== 0) return;
    this.fingers.set(event.pointerId, event);
    this.dragged = false;
  }

  private move(event: PointerEvent): void {
    const before = this.fingers.get(event.pointerId);
    if (!before) return;
    const [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
    if (!this.dragged && Math.hypot(dx, dy) < 4) return;
    if (!this.dragged) this.surface.setPointerCapture(event.pointerId);
    this.dragged = true;
    const [other] = [...this.fingers.values()].filter((finger) => finger.pointerId !== event.pointerId);
    this.fingers.set(event.pointerId, event);
    if (!other) return this.by(dx, dy);
    const spread = (finger: PointerEvent) => Math.hypot(finger.clientX - other.clientX, finger.clientY - other.clientY);
    const box = this.surface.getBoundingClientRect();
    this.around(other.clientX - box.left, other.clientY - box.top, spread(event) / Math.max(1, spread(before)));
  }

  by(dx: number, dy: number): void {
    this.stop();
    this.x += dx;
    this.y += dy;
    this.moved();
  }

  around(x: number, y: number, factor: number): void {
    this.stop();
    const scale = Math.min(MOST, Math.max(LEAST, this.scale * factor));
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.moved();
  }

  /** Show the rectangle in the middle, as large as it fits but no larger than `most`. */
  fit(x: number, y: number, width: number, height: number, most: number, animated = true): void {
    const box = this.surface.getBoundingClientRect();
    if (!box.width || !box.height) return;
    const scale = Math.max(LEAST, Math.min(most, this.fitting(width, height)));
    this.to(box.width / 2 - (x + width / 2) * scale, box.height / 2 - (y + height / 2) * scale, scale, animated);
  }

  /** How large something of this size can be shown whole. */
  fitting(width: number, height: number): number {
    const box = this.surface.getBoundingClientRect();
    return Math.min((box.width - 48) / width, (box.height - 48) / height);
  }

  to(x: number, y: number, scale: number, animated: boolean): void {
    this.stop();
    if (!animated || matchMedia("(prefers-reduced-motion: reduce)").matches) {
      Object.assign(this, { x, y, scale });
      return this.moved();
    }
    const from = { x: this.x, y: this.y, scale: this.scale };
    const begin = performance.now();
    const tick = (now: number) => {
      const share = Math.min(1, Math.max(0, (now - begin) / 220));
      const eased = 1 - (1 - share) ** 3;
      this.x = from.x + (x - from.x) * eased;
      this.y = from.y + (y - from.y) * eased;
      this.scale = from.scale + (scale - from.scale) * eased;
      this.moved();
      this.flight = share < 1 ? requestAnimationFrame(tick) : 0;
    };
    this.flight = requestAnimationFrame(tick);
  }

  private stop(): void {
    cancelAnimationFrame(this.flight);
    this.flight = 0;
  }
}
