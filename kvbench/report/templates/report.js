// A row of a table is a tbody, of one line or several; the first of its cells in a column that has
// a value is its key.
for (const button of document.querySelectorAll("thead button")) button.addEventListener("click", () => {
  const head = button.parentElement, table = head.closest("table"), column = head.dataset.column;
  const turn = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", turn > 0 ? "ascending" : "descending");
  const key = body => body.querySelector(`[data-column="${column}"][data-value]`)?.dataset.value;
  const bodies = [...table.tBodies].map(body => [key(body), body]);
  bodies.sort(([one], [two]) => {
    if (one === undefined || two === undefined) return (one === undefined) - (two === undefined);
    const numbers = !isNaN(one) && !isNaN(two);
    return turn * (numbers ? one - two : !isNaN(one) ? -1 : !isNaN(two) ? 1 : one.localeCompare(two));
  });
  for (const [, body] of bodies) table.append(body);
});
const reveal = () => { const run = document.getElementById(location.hash.slice(1)); if (run) run.open = true; };
addEventListener("hashchange", reveal);
reveal();
