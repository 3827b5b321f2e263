// The theme puts every "copy" button into a <nav>, all without a name: they are no landmarks.
"use strict";
const unmark = () => {
  for (const nav of document.querySelectorAll("nav.md-code__nav")) nav.setAttribute("role", "none");
};
addEventListener("load", () => {
  unmark();
  new MutationObserver(unmark).observe(document.body, { childList: true, subtree: true });
});
