// Tables that keep their rows: a row is made once and changed in place, so the focus stays where it is. Of a long table
// only the rows in sight exist.

import { attribute, el, replace } from "./dom.js";

const ROW_PX = 40;
const WHOLE_ROWS = 100;
const MARGIN_ROWS = 10;

/**
 * @template T
 * @typedef {object} Column
 * @property {string} title
 * @property {string} [kind] a class for its cells, such as `number`
 * @property {(cell: HTMLElement, item: T) => void} show fills the cell, anew at each update
 */

/** @template T */
export class Table {
  /**
   * @param {string} caption
   * @param {Column<T>[]} columns
   * @param {(item: T) => string} key
   * @param {(row: HTMLElement, item: T) => void} [mark] sets attributes of a row
   */
  constructor(caption, columns, key, mark = () => undefined) {
    this.columns = columns;
    this.key = key;
    this.mark = mark;
    /** @type {T[]} */
    this.items = [];
    /** @type {Map<string, HTMLTableRowElement>} */
    this.rows = new Map();
    this.body = el("tbody");
    this.above = el("tbody", { "aria-hidden": "true" });
    this.below = el("tbody", { "aria-hidden": "true" });
    const heads = columns.map((column) => el("th", { scope: "col", class: column.kind }, column.title));
    this.table = el(
      "table",
      {},
      el("caption", { class: "hidden" }, caption),
      el("thead", {}, el("tr", {}, ...heads)),
      this.above,
      this.body,
      this.below,
    );
    /** What stands on the page. */
    this.element = el("div", { class: "table", role: "region", "aria-label": caption, tabindex: "0" }, this.table);
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
  }

  /**
   * @param {T[]} items in their order
   * @param {number} grown rows that are new at the top: what is being read stays in its place
   */
  update(items, grown = 0) {
    this.items = items;
    const long = items.length > WHOLE_ROWS;
    this.element.classList.toggle("long", long);
    attribute(this.table, "aria-rowcount", long ? items.length + 1 : null);
    this.draw();
    if (grown > 0 && this.element.scrollTop > 0) {
      this.element.scrollTop += grown * ROW_PX;
      this.draw();
    }
  }

  draw() {
    const { items } = this;
    const long = items.length > WHOLE_ROWS;
    const first = long ? Math.max(0, Math.floor(this.element.scrollTop / ROW_PX) - MARGIN_ROWS) : 0;
    const seen = long ? Math.ceil(this.element.clientHeight / ROW_PX) + 2 * MARGIN_ROWS : items.length;
    const shown = items.slice(first, first + seen);
    this.space(this.above, first);
    this.space(this.below, items.length - first - shown.length);
    const kept = new Set(shown.map(this.key));
    for (const [key, row] of this.rows) {
      if (!kept.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    let place = /** @type {Element | null} */ (this.body.firstElementChild);
    shown.forEach((item, index) => {
      const row = this.row(item);
      attribute(row, "aria-rowindex", long ? first + index + 2 : null);
      if (row === place) {
        place = place.nextElementSibling;
      } else {
        this.body.insertBefore(row, place);
      }
    });
  }

  /** @param {HTMLElement} space @param {number} rows */
  space(space, rows) {
    if (Number(space.dataset.rows ?? 0) === rows) return;
    space.dataset.rows = String(rows);
    const cell = el("td", { colspan: this.columns.length });
    cell.style.height = `${rows * ROW_PX}px`;
    replace(space, rows > 0 && el("tr", { class: "space" }, cell));
  }

  /** @param {T} item */
  row(item) {
    const key = this.key(item);
    let row = this.rows.get(key);
    if (!row) {
      row = el("tr", {}, ...this.columns.map((column) => el("td", { class: column.kind, "data-title": column.title })));
      this.rows.set(key, row);
    }
    this.mark(row, item);
    const cells = row.children;
    this.columns.forEach((column, index) => column.show(/** @type {HTMLElement} */ (cells[index]), item));
    return row;
  }
}
