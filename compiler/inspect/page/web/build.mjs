// Bundles the page's TypeScript and styles into one file, ../page.html: a template which document.py fills with a plan.
import { readFile, rename, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const options = { bundle: true, minify: true, write: false, legalComments: "none", charset: "ascii", absWorkingDir: here };

const script = await build({ ...options, entryPoints: ["main.ts"], format: "iife", target: "es2022" });
const style = await build({ ...options, entryPoints: ["style.css"] });

const licences = [];
for (const name of ["dagre", "graphlib"]) {
  const folder = join(here, "node_modules/@dagrejs", name);
  const { version } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
  licences.push(`@dagrejs/${name} ${version}\n\n${(await readFile(join(folder, "LICENSE"), "utf8")).trim()}`);
}

// What ends up inside an element must not be able to end it.
const inside = (text, name) => {
  if (text.toLowerCase().includes(`</${name}`)) throw new Error(`the bundle holds </${name}`);
  return text.trim();
};

const template = (await readFile(join(here, "template.html"), "utf8"))
  .replace("{{licences}}", () => inside(licences.join("\n\n"), "script"))
  .replace("{{style}}", () => inside(style.outputFiles[0].text, "style"))
  .replace("{{script}}", () => inside(script.outputFiles[0].text, "script"));

// Whole or not at all: another process may be reading it.
const target = join(here, "..", "page.html");
await writeFile(`${target}.new`, template);
await rename(`${target}.new`, target);
console.log(`built the inspector's page: ${Math.round(template.length / 1024)} KiB`);
