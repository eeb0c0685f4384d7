// The command for somebody who is invited to a training run, from the link that they were sent.

const given = new URLSearchParams(location.hash.slice(1));
const token = given.get("token") ?? "";
const images = given.get("fetch") ?? "";

// A link could hold anything, and people paste the command into a shell.
if (/^[A-Za-z0-9._~-]{16,512}$/.test(token) && ["", "own", "all"].includes(images)) {
  const scheduler = location.origin + (document.documentElement.dataset.root ?? "");
  const command = `TERRACE_TOKEN='${token}' terrace train work --scheduler ${scheduler}${images && ` --fetch ${images}`}`;
  /** @type {HTMLElement} */ (document.getElementById("command")).textContent = command;
  /** @type {HTMLElement} */ (document.getElementById("note")).textContent = images ? "The training images come from the run." : "Your machine needs the training images: add --data FOLDER.";
}
