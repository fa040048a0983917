// Numbers as people read them.

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const COUNT_UNITS = ["", "k", "M", "G", "T", "P", "E"];

function scaled(value: number, step: number, units: string[]): [string, string] {
  let at = 0;
  while (Math.abs(value) >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return [value.toFixed(digits), units[at] ?? ""];
}

export function bytes(value: number): string {
  const [number, unit] = scaled(value, 1024, BYTE_UNITS);
  return `${number} ${unit}`;
}

export function signedBytes(value: number): string {
  return value > 0 ? `+${bytes(value)}` : value < 0 ? `−${bytes(-value)}` : "0 B";
}

export function flops(value: number): string {
  const [number, unit] = scaled(value, 1000, COUNT_UNITS);
  return `${number} ${unit}FLOP`;
}

export function seconds(value: number): string {
  if (value === 0) return "0 s";
  for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]] as const) {
    if (Math.abs(value) >= scale) return `${Number((value / scale).toPrecision(3))} ${unit}`;
  }
  return `${Number((value / 1e-9).toPrecision(3))} ns`;
}

export function count(value: number, one: string, many = `${one}s`): string {
  return `${value.toLocaleString("en-US")} ${value === 1 ? one : many}`;
}

export function clipped(text: string, length: number): string {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}
