// Work that a page does only while somebody can see it.

/**
 * Begins something now and each time the page comes into view, and ends it when the page is hidden.
 * @param {() => () => void} start returns what ends it
 */
export function whileVisible(start) {
  /** @type {(() => void) | null} */
  let end = null;
  const change = () => {
    if (document.hidden) {
      end?.();
      end = null;
    } else {
      end ??= start();
    }
  };
  document.addEventListener("visibilitychange", change);
  change();
}
