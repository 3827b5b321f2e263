"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.sort ?? cell.textContent.trim();
    const number = Number(text);
    return text === "" ? null : Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true });
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [value(row, column), row]);
      rows.sort(([a], [b]) =>
        a === null || b === null ? (a === null) - (b === null) : (down ? -1 : 1) * compare(a, b));
      body.append(...rows.map(([, row]) => row));
    });
  });
}

const form = document.querySelector(".filters");
const cards = [...document.querySelectorAll(".card")].map((card) =>
  [card, [...card.querySelectorAll(".entry")]]);
function filter() {
  const wanted = [...form.querySelectorAll("select")].filter((select) => select.value !== "");
  let shown = 0;
  let all = 0;
  for (const [card, entries] of cards) {
    let left = 0;
    for (const entry of entries) {
      const fits = wanted.every((select) => entry.dataset[select.name] === select.value);
      entry.hidden = !fits;
      left += fits;
    }
    card.hidden = left === 0;
    shown += left;
    all += entries.length;
  }
  form.querySelector("output").textContent = `${shown} of ${all} cells shown`;
}
form.hidden = false;
form.addEventListener("change", filter);
form.addEventListener("submit", (event) => event.preventDefault());
filter();
