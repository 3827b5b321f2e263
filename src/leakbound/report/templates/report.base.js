"use strict";
const make = (name, properties = {}, ...inside) => {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...inside);
  return element;
};

const scheme = document.querySelector("#scheme");
scheme.parentElement.hidden = false;
scheme.addEventListener("change", () => {
  document.documentElement.dataset.scheme = scheme.value;
});

const said = make("p", { className: "hidden", role: "status" });
document.body.append(said);

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
    const button = make("button", { type: "button", title: "Sort by this column" }, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      said.textContent = `sorted by ${head.textContent}, ${down ? "descending" : "ascending"}`;
      const rows = [...body.rows].map((row) => [value(row, column), row]);
      rows.sort(([a], [b]) =>
        a === null || b === null ? (a === null) - (b === null) : (down ? -1 : 1) * compare(a, b));
      body.append(...rows.map(([, row]) => row));
    });
  });
}
