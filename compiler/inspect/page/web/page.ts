// What every view is given, and what the page expects of a view.

import type { Alive } from "./alive";
import type { Comparison, Several } from "./data";
import type { Measured } from "./measured";
import type { Model } from "./model";
import type { Store } from "./store";
import type { Tree } from "./tree";

export interface Page {
  title: string;
  model: Model;
  tree: Tree;
  alive: Alive;
  store: Store;
  measured: Measured | null;
  comparison: Comparison | null;
  several: Several | null;
  /** which of several meshes is shown */
  part: number;
  choose: (part: number) => void;
}

export interface Shown {
  readonly element: HTMLElement;
  /** called when the view comes onto the screen, and when something it shows may have changed */
  update(): void;
  /** called when it stands on paper, in its size there, and when it is back on the screen */
  print?(on: boolean): void;
  focus(): void;
}
