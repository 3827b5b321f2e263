// The cards stand in <noscript>, so that a large page is there at once: what comes near the window
// is filled first, the rest when there is time.
const cards = [...document.querySelectorAll(".card")];
const fill = (card) => {
  const kept = card.querySelector(":scope > noscript");
  if (kept === null) return;
  const parsed = document.createElement("template");
  parsed.innerHTML = kept.textContent;
  kept.replaceWith(parsed.content);
  card.style.minHeight = "";
};
const fillAll = () => cards.forEach(fill);
const soon = window.requestIdleCallback ?? ((work) => setTimeout(() => work({ timeRemaining: () => 20 }), 1));
const near = new IntersectionObserver((seen) => {
  for (const { isIntersecting, target } of seen) {
    if (isIntersecting) {
      near.unobserve(target);
      fill(target);
    }
  }
}, { rootMargin: "800px" });
cards.forEach((card) => near.observe(card));
let next = 0;
const fillSome = (deadline) => {
  do {
    if (next === cards.length) {
      document.documentElement.dataset.whole = "yes";
      return;
    }
    fill(cards[next++]);
  } while (deadline.timeRemaining() > 4);
  soon(fillSome);
};
addEventListener("load", () => soon(fillSome));
addEventListener("beforeprint", fillAll);

// A page of cards at a time, so that a large run stays short.
const form = document.querySelector(".filters");
const STEP = 8;
let room = STEP;
const more = document.querySelector(".more-cards");
const filter = () => {
  fillAll();
  const wanted = [...form.querySelectorAll("select")].filter((select) => select.value !== "");
  let fitting = 0;
  let all = 0;
  let place = 0;
  for (const card of cards) {
    let left = 0;
    for (const entry of card.querySelectorAll(".entry")) {
      const fits = wanted.every((select) => entry.dataset[select.name] === select.value);
      entry.hidden = !fits;
      left += fits;
      all += 1;
    }
    place += left > 0;
    card.hidden = left === 0 || place > room;
    fitting += left;
  }
  more.hidden = place <= room;
  more.textContent = `Show ${Math.min(STEP, place - room)} more of ${place - room} batches`;
  form.querySelector("output").textContent = `${fitting} of ${all} experiments fit`;
};
form.hidden = false;
form.addEventListener("change", () => {
  room = STEP;
  filter();
});
form.addEventListener("submit", (event) => event.preventDefault());
more.addEventListener("click", () => {
  room += STEP;
  filter();
});
cards.forEach((card, i) => {
  card.hidden = i >= STEP;
});
more.hidden = cards.length <= STEP;
more.textContent = `Show ${Math.min(STEP, cards.length - STEP)} more of ${cards.length - STEP} batches`;

// What an address names is opened, wherever it is folded away.
const reveal = () => {
  const target = document.getElementById(location.hash.slice(1));
  if (!target) return;
  const card = target.closest(".card");
  if (card) card.hidden = false;
  for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) {
    fold.open = true;
  }
  target.scrollIntoView();
};
addEventListener("hashchange", reveal);
addEventListener("load", reveal);
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details.fold")) fold.open = true;
  cards.forEach((card) => { card.hidden = false; });
});

const views = [...document.querySelectorAll(".view")];
const choose = () => {
  const chosen = document.querySelector(".views input:checked");
  for (const view of views) {
    const shown = view.dataset.view === chosen.value;
    view.classList.toggle("chosen", shown);
    view.toggleAttribute("data-later", !shown);
  }
};
if (views.length > 0) {
  document.documentElement.dataset.ready = "yes";
  document.querySelector(".views").addEventListener("change", choose);
  choose();
}
