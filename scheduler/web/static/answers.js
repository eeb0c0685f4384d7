// How an answer is written, wherever a page shows one.

/** Below this an answer is shown as a guess. */
export const UNSURE = 0.5;

/** @param {string} label a class */
export function words(label) {
  return label.replaceAll("_", " ");
}

/** @param {{label: string, confidence: number} | null} answer */
export function answerWords(answer) {
  return answer ? `${words(answer.label)} ${Math.round(100 * answer.confidence)} %` : "";
}
