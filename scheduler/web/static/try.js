import { begin, main } from "./shell.js";
import { el } from "./dom.js";

begin(() => {
  main.append(el("p", { class: "muted" }, "…"));
});
