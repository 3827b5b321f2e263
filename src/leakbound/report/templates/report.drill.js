// One example: the truth, every reconstruction and all measures, out of the card that holds them.
const dialog = make("dialog", { className: "drill" });
dialog.setAttribute("aria-labelledby", "drill-title");
const status = make("p", { className: "hidden", role: "status" });
const inside = make("div", { className: "drill-body" });
dialog.append(status, inside);
document.body.append(dialog);
let now = null;
let opener = null;

const examples = (card) => [...card.querySelectorAll("table.examples tbody")];
const crop = (strip, place, count, alt) => {
  // The strip's own picture, moved and cut to one of its examples.
  const gap = Number(strip.dataset.gap);
  const width = (strip.width - gap * (count - 1)) / count;
  const picture = make("img", { src: strip.src, alt, decoding: "async", width, height: strip.height });
  picture.style.aspectRatio = `${width} / ${strip.height}`;
  picture.style.objectPosition = `${count > 1 ? (100 * place) / (count - 1) : 0}% 0`;
  return picture;
};
const figure = (picture, ...words) => make("figure", {}, picture, make("figcaption", {}, ...words));

const shots = (card, place) => {
  const made = make("div", { className: "shots" });
  for (const part of card.querySelectorAll(".strip.truth, .strip.leak, .entry")) {
    const strip = part.querySelector("img");
    if (!part.matches(".entry")) {
      const word = part.matches(".truth") ? "true example" : "leak map";
      const count = strip.closest(".card").querySelector(".scores")?.children.length ?? 1;
      made.append(figure(crop(strip, place, count, `${word} ${place + 1}`), word));
      continue;
    }
    const score = part.querySelector(".scores")?.children[place];
    const row = part.querySelector(`table.row[data-place="${place}"]`);
    if (row) made.append(row.cloneNode(true));
    if (!strip || !score) continue;
    const attack = part.dataset.attack;
    const over = score.matches(".hit") ? ", over the threshold" : "";
    const count = score.parentElement.children.length;
    const { axis, unit } = card.parentElement.dataset;
    const alt = `example ${place + 1} as ${attack} reconstructed it: ${axis} ${score.textContent} ${unit}${over}`;
    const note = part.querySelector(":scope > .note");
    made.append(figure(crop(strip, place, count, alt), make("strong", {}, attack),
      ` ${score.textContent} ${unit}${over}`, ...(note ? [make("small", {}, note.textContent)] : [])));
  }
  return made;
};

const measures = (card, place) => {
  const whole = card.querySelector("table.examples");
  const body = examples(card)[place].cloneNode(true);
  body.removeAttribute("id");
  const table = make("table", { className: "examples" },
    make("caption", {}, "All measures of this example"), whole.tHead.cloneNode(true), body);
  const scroll = make("div", { className: "scroll", role: "region", tabIndex: 0 }, table);
  scroll.setAttribute("aria-label", "All measures of this example");
  return scroll;
};

const beside = (card, step) => {
  // The same batch under the defense before or after.
  const same = cards.filter((other) => other.dataset.batch === card.dataset.batch);
  return same[same.indexOf(card) + step];
};

const button = (text, key, act, className = "") => {
  const made = make("button", { type: "button", className: `plain ${className}`, disabled: !act }, text);
  if (act) made.addEventListener("click", act);
  made.dataset.key = key;
  return made;
};

const bar = (card, place, count) => {
  const turn = (to, where) => to && (() => show(to, where));
  const [before, after] = [beside(card, -1), beside(card, 1)];
  const name = (other) => (other ? `: ${other.querySelector("h3").textContent}` : "");
  const made = make("div", { className: "drill-bar" },
    button("← example before", "ArrowLeft", turn(place > 0 && card, place - 1)),
    button("example after →", "ArrowRight", turn(place < count - 1 && card, place + 1)),
    button(`defense before${name(before)}`, "before", turn(before, place)),
    button(`defense after${name(after)}`, "after", turn(after, place)),
    button("close (Esc)", "Escape", () => dialog.close(), "close"));
  return made;
};

const show = (card, wanted) => {
  fill(card);
  const count = examples(card).length;
  if (count === 0) return;
  const place = Math.min(wanted, count - 1);
  const key = dialog.open ? document.activeElement?.dataset.key : null;
  now = { card, place, count };
  const words = `Example ${place + 1} of ${count}: ${card.querySelector("h3").textContent}`;
  const title = make("h2", { id: "drill-title", tabIndex: -1 }, words);
  inside.replaceChildren(title, card.querySelector(".where").cloneNode(true),
    bar(card, place, count), shots(card, place), measures(card, place),
    card.querySelector(".facts-list").cloneNode(true));
  history.replaceState(null, "", `#${examples(card)[place].id}`);
  if (!dialog.open) {
    opener = document.activeElement;
    dialog.showModal();
  }
  status.textContent = words;
  const again = key && dialog.querySelector(`[data-key="${key}"]:not(:disabled)`);
  (again || title).focus();
};

dialog.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest(".scroll, pre")) return;
  const { card, place, count } = now;
  const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: count - 1 }[event.key];
  if (to === undefined || to < 0 || to >= count) return;
  event.preventDefault();
  show(card, to);
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});
dialog.addEventListener("close", () => {
  history.replaceState(null, "", `#${now.card.id}`);
  (opener?.isConnected && opener !== document.body ? opener : now.card.querySelector(".scores a"))?.focus();
  now = opener = null;
});

const follow = (address) => {
  const [, card, place] = /^#example-(\d+)-(\d+)$/.exec(address) ?? [];
  const found = card && document.getElementById(`card-${card}`);
  if (found) show(found, Number(place) - 1);
  return Boolean(found);
};
addEventListener("hashchange", () => follow(location.hash));
document.addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="#example-"]');
  const plain = !(event.ctrlKey || event.metaKey || event.shiftKey);
  if (link && plain && follow(link.hash)) event.preventDefault();
  const strip = event.target.closest?.(".card .strip img");
  if (!strip) return;
  const card = strip.closest(".card");
  const count = card.querySelector(".scores")?.children.length;
  if (count) show(card, Math.floor((count * event.offsetX) / strip.clientWidth));
});
follow(location.hash);
