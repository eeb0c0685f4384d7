// What charts have in common: the colours of the page, which they do not follow by themselves.

/** @param {string} name of a variable of the style */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

/** How axes look now. */
export function axisStyle() {
  const line = { stroke: colour("--line"), width: 1 };
  return { stroke: colour("--muted"), grid: line, ticks: line };
}
