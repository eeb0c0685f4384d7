// The one command with which a machine joins a training run, with an invitation where tokens are asked for.

import { root, send } from "./api.js";
import { el, text } from "./dom.js";
import { clock } from "./format.js";
import { attempt } from "./shell.js";

const VALID_S = 3600;
const WORK = `terrace train work --scheduler ${location.origin}${root}`;

/** @typedef {import("./types").Run} Run */

/** Shows the command of the run that it was given last. */
export class Joining {
  constructor() {
    this.command = el("code", { "data-testid": "join" });
    this.said = el("span", { class: "muted", role: "status" });
    this.note = el("p", { class: "muted" });
    const copy = el("button", { type: "button", click: () => attempt(() => this.copy()) }, "Copy");
    this.element = el("div", {}, el("p", { class: "join" }, this.command, copy, this.said), this.note);
    /** @type {Run | null} */
    this.run = null;
    this.invited = "";
  }

  /** @param {Run} run */
  show(run) {
    if (this.run?.id !== run.id) this.invited = "";
    this.run = run;
    if (this.invited) return;
    text(this.command, `${WORK} --run ${run.id}${this.fetches(run)}`);
    text(this.note, run.owner === null ? "On any machine that reaches the scheduler and the host." : "On any machine that reaches the scheduler and the host, with a token of the role worker.");
  }

  /** Makes an invitation for one machine, and puts it into the command. */
  async invite() {
    const run = this.run;
    if (!run) return;
    const answer = await send("POST", `/v1/runs/${run.id}/invitations`, { uses: 1, expires_s: VALID_S });
    const { token, expires } = await answer.json();
    this.invited = run.id;
    text(this.command, `TERRACE_TOKEN='${token}' ${WORK}${this.fetches(run)}`);
    text(this.note, `For one machine that reaches the scheduler and the host, until ${clock(Date.parse(expires) / 1000)}. The invitation is shown only now.`);
  }

  /** @param {Run} run */
  fetches(run) {
    return run.config.share_data === true ? " --fetch own" : "";
  }

  async copy() {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(this.command.textContent ?? "");
      text(this.said, "Copied.");
    } else {
      // Browsers lend the clipboard to pages by TLS, or of this machine, alone.
      window.getSelection()?.selectAllChildren(this.command);
      text(this.said, "Selected: copy it with the keyboard.");
    }
  }
}
