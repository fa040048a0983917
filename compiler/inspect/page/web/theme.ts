// Dark and light: the system's, until the reader chooses.

import { h } from "./dom";

const KEY = "monarch-theme";

export function themeButton(): HTMLButtonElement {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset["theme"] ?? (system.matches ? "dark" : "light")) === "dark";
  const button = h("button", { type: "button", class: "icon" });
  const say = () => {
    button.textContent = isDark() ? "☀" : "☾";
    const label = isDark() ? "Light colours (T)" : "Dark colours (T)";
    button.title = label;
    button.setAttribute("aria-label", label);
  };
  const kept = remembered();
  if (kept) root.dataset["theme"] = kept;
  button.addEventListener("click", () => {
    root.dataset["theme"] = isDark() ? "light" : "dark";
    remember(root.dataset["theme"]);
    say();
  });
  system.addEventListener("change", say);
  say();
  return button;
}

// A page in a sandboxed frame has no storage: then the choice lasts as long as the page.
function remembered(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch (error) {
    if (error instanceof DOMException) return null;
    throw error;
  }
}

function remember(theme: string): void {
  try {
    localStorage.setItem(KEY, theme);
  } catch (error) {
    if (!(error instanceof DOMException)) throw error;
  }
}
