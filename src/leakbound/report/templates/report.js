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

const form = document.querySelector(".filters");
const filter = () => {
  fillAll();
  const wanted = [...form.querySelectorAll("select")].filter((select) => select.value !== "");
  let shown = 0;
  let all = 0;
  for (const card of cards) {
    let left = 0;
    for (const entry of card.querySelectorAll(".entry")) {
      const fits = wanted.every((select) => entry.dataset[select.name] === select.value);
      entry.hidden = !fits;
      left += fits;
      all += 1;
    }
    card.hidden = left === 0;
    shown += left;
  }
  form.querySelector("output").textContent = `${shown} of ${all} experiments shown`;
};
form.hidden = false;
form.addEventListener("change", filter);
form.addEventListener("submit", (event) => event.preventDefault());
