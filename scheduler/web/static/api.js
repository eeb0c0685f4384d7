// Requests to the scheduler's public API, and its event streams.

/** The path of the site below which the scheduler is served; "" for none. All addresses begin with it. */
export const root = document.documentElement.dataset.root ?? "";

/** What went wrong, in a sentence for people. */
export class ApiError extends Error {
  /** @param {number} status 0: it was not reached @param {string} sentence */
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

/**
 * @param {string} path @param {RequestInit} [options]
 * @returns {Promise<Response>} whose status says that all went well
 */
export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(root + path, { ...options, credentials: "same-origin" });
  } catch {
    throw new ApiError(0, "The scheduler cannot be reached.");
  }
  if (response.ok) return response;
  if (response.status === 401) document.dispatchEvent(new Event("signed-out"));
  let sentence = `The scheduler answered ${response.status}.`;
  try {
    sentence = (await response.json()).error ?? sentence;
  } catch {
    // Not from the scheduler itself: a proxy.
  }
  throw new ApiError(response.status, sentence);
}

/** @param {string} path @returns {Promise<any>} */
export async function get(path) {
  return (await request(path)).json();
}

/** @param {"POST" | "PUT" | "DELETE"} method @param {string} path @param {unknown} [content] of JSON */
export async function send(method, path, content) {
  const body = content === undefined ? {} : { body: JSON.stringify(content), headers: { "content-type": "application/json" } };
  return request(path, { method, ...body });
}

/** @typedef {Record<string, (data: any) => void>} Handlers */

const AGAIN_MS = 1500;

/**
 * Follows an event stream for as long as the page is open, also over restarts of the scheduler.
 * @param {string} path
 * @param {Handlers} handlers by the names of the events
 * @param {{reopened?: () => void, connected?: (well: boolean) => void}} [told] `reopened`: the stream is a new one, so events may be missing
 * @returns {() => void} ends it
 */
export function follow(path, handlers, told = {}) {
  /** @type {EventSource} */
  let source;
  let timer = 0;
  let ended = false;
  const open = (/** @type {boolean} */ again) => {
    source = new EventSource(root + path);
    source.addEventListener("open", () => {
      connection(true);
      told.connected?.(true);
      if (again) told.reopened?.();
      again = false;
    });
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        heard = new Date();
        handle(JSON.parse(/** @type {MessageEvent} */ (event).data));
      });
    }
    source.addEventListener("error", () => {
      if (ended) return;
      connection(false);
      told.connected?.(false);
      if (source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      timer = window.setTimeout(() => {
        // A refusal has no status here; a request tells whether it is for want of a token.
        request("/v1/whoami").then(
          () => !ended && open(true),
          (refusal) => {
            if (refusal.status === 401) connection(true); // the page asks for a token, and is loaded again with it
            else if (!ended) source.dispatchEvent(new Event("error"));
          },
        );
      }, AGAIN_MS);
    });
  };
  open(false);
  return () => {
    ended = true;
    window.clearTimeout(timer);
    source.close();
  };
}

/** When the scheduler was heard last. @type {Date | null} */
let heard = null;

/** @param {boolean} well */
function connection(well) {
  const line = document.getElementById("connection");
  const since = heard ? ` What stands here is as of ${heard.toLocaleTimeString("en-GB")}.` : "";
  if (line) line.textContent = well ? "" : `No connection to the scheduler.${since} Trying again …`;
}
