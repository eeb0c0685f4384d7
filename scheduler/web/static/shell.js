// What all pages share: who is signed in, and how to sign in.

import { ApiError, get, send } from "./api.js";
import { el, replace } from "./dom.js";

/**
 * Who looks: whether they may drain and remove nodes, whether they say where data goes, the name of their token, and the
 * only sites that they may use (empty: all). Known when a page begins.
 * @type {{operates: boolean, administers: boolean, name: string | null, sites: string[]}}
 */
export const caller = { operates: true, administers: true, name: null, sites: [] };

/** The element that a page fills. */
export const main = /** @type {HTMLElement} */ (document.getElementById("main"));

/**
 * Begins a page once it may read the API: at once, or after somebody has signed in.
 * @param {() => void | Promise<void>} start
 */
export async function begin(start) {
  document.addEventListener("signed-out", () => signIn());
  // The address stays: it may name a site.
  document.querySelector(".skip")?.addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  try {
    await showCaller();
    await start();
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 401)) tell(error);
  }
}

/** Says what went wrong at the top of the page. @param {unknown} error */
export function tell(error) {
  const sentence = error instanceof Error ? error.message : String(error);
  const line = el("p", { class: "trouble", role: "alert" }, sentence);
  line.append(el("button", { type: "button", class: "quiet", "aria-label": "Dismiss", click: () => line.remove() }, "×"));
  main.querySelector(".trouble")?.remove();
  main.querySelector("h1")?.after(line);
}

/** Does something that a person has asked for, and tells if it fails. @param {() => Promise<unknown>} act */
export async function attempt(act) {
  try {
    await act();
  } catch (error) {
    tell(error);
  }
}

/**
 * Makes something that may be asked for often: it is done at once, but again only some time after it was last done.
 * @param {number} pauseMs @param {() => Promise<unknown>} act
 * @returns {() => void} asks for it
 */
export function atMost(pauseMs, act) {
  let asked = false;
  let busy = false;
  const go = async () => {
    busy = true;
    asked = false;
    try {
      await act();
    } catch (error) {
      // That the scheduler is away, the event stream tells.
      if (!(error instanceof ApiError && [0, 401].includes(error.status))) tell(error);
    }
    window.setTimeout(() => (asked ? void go() : (busy = false)), pauseMs);
  };
  return () => {
    asked = true;
    if (!busy) void go();
  };
}

async function showCaller() {
  const holder = await get("/v1/whoami");
  caller.name = holder.name;
  caller.sites = holder.sites;
  caller.operates = holder.name === null || ["operator", "admin"].includes(holder.role);
  caller.administers = holder.name === null || holder.role === "admin";
  const place = document.getElementById("who");
  if (!place || holder.name === null) return;
  const leave = async () => {
    await send("DELETE", "/v1/session");
    location.reload();
  };
  replace(
    place,
    el("span", {}, `${holder.name} (${holder.role})`),
    el("button", { type: "button", class: "quiet", click: () => attempt(leave) }, "Sign out"),
  );
}

/** Asks for a token, once. */
function signIn() {
  if (document.getElementById("sign-in")) return;
  const token = el("input", { type: "password", id: "token", name: "token", autocomplete: "off", required: true });
  const wrong = el("p", { class: "wrong", role: "alert" });
  const submit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    try {
      await send("POST", "/v1/session", { token: token.value.trim() });
      location.reload();
    } catch (error) {
      wrong.textContent = error instanceof Error ? error.message : String(error);
    }
  };
  const heading = main.querySelector("h1");
  replace(
    main,
    heading,
    el(
      "form",
      { id: "sign-in", class: "card", "data-testid": "sign-in", submit },
      el("label", { for: "token" }, "Token"),
      token,
      el("button", { type: "submit", class: "strong" }, "Sign in"),
      wrong,
      el("p", { class: "muted" }, "A person's token, as ", el("code", {}, "terrace token create --role user"), " makes it. The browser keeps a session, not the token."),
    ),
  );
  token.focus();
}
