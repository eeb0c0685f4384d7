// The button next to a command copies it without its prompt and output.
document.addEventListener(
  "click",
  (event) => {
    const button = event.target.closest('button[data-md-type="copy"]');
    const code = button?.closest(".language-console")?.querySelector("code");
    if (!code) return;
    event.stopImmediatePropagation();
    const commands = code.cloneNode(true);
    for (const part of commands.querySelectorAll(".gp, .go")) part.remove();
    navigator.clipboard.writeText(commands.textContent.trim());
  },
  true,
);
