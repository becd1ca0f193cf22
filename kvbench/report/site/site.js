// Sorts and filters tables, and sets samples side by side. All that it reads stands in the page.
"use strict";

const number = (row, name) => {
  const cell = row.querySelector(`td[data-name="${name}"]`);
  return cell ? Number(cell.dataset.value) : null;
};
const make = (tag, text = "", look = "") => {
  const node = document.createElement(tag);
  node.textContent = text;
  if (look) node.className = look;
  return node;
};

// -- sorting ----------------------------------------------------------------------------------------------------------

const key = (row, name) => {
  const cell = row.querySelector(`[data-name="${name}"]`), own = row.dataset[name];
  if (cell && cell.dataset.value !== undefined) return Number(cell.dataset.value);
  if (own === undefined || own === "-") return null;
  const size = parseFloat(own);
  return isNaN(size) ? own : own.endsWith("%") ? size / 100 : size;
};
const sort = (head, turn) => {
  const table = head.closest("table"), body = table.tBodies[0];
  for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", turn > 0 ? "ascending" : "descending");
  const rows = [...body.rows].map(row => [key(row, head.dataset.name), row]);
  rows.sort(([one], [two]) => {
    if (one === null || two === null) return (one === null) - (two === null); // what has none stays below
    return turn * (typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(two));
  });
  body.append(...rows.map(([, row]) => row));
};
for (const button of document.querySelectorAll(".sortable thead button")) button.addEventListener("click", () => {
  const head = button.parentElement;
  const turn = { ascending: -1, descending: 1 }[head.getAttribute("aria-sort")] ?? (head.dataset.name === "score" ? -1 : 1);
  sort(head, turn);
});

// -- filters: each is a choice that rows, or the section that they stand in, have among their data -------------------

const filters = document.getElementById("filters"), answers = document.getElementById("answers");

const within = (row, wanted) => {
  if (answers) return row.dataset.share === wanted.share;
  const held = wanted.share && number(row, wanted.index ? "index_share" : "device_share");
  return !wanted.share || (held !== null && held <= Number(wanted.share));
};
const fits = (row, wanted) => {
  const of = { ...row.closest("details.section")?.dataset, ...row.dataset }, words = (wanted.method ?? "").trim().toLowerCase();
  return within(row, wanted)
    && ["task", "question", "model", "protocol", "whose"].every(key => !wanted[key] || of[key] === wanted[key])
    && (!wanted.budget || of.budget === wanted.budget || of.budget === "-")
    && (!words || `${of.method} ${row.cells[0].textContent}`.toLowerCase().includes(words));
};
const filter = () => {
  const wanted = Object.fromEntries(new FormData(filters)), start = answers ? { share: answers.dataset.share } : {};
  const changed = Object.entries(wanted).filter(([name, value]) => value && value !== start[name]);
  for (const group of document.querySelectorAll(answers ? "#answers tbody" : "details.section")) {
    const rows = [...group.querySelectorAll("tbody tr, tr")].filter(row => row.querySelector("td"));
    for (const row of rows) row.hidden = !fits(row, wanted);
    group.hidden = rows.every(row => row.hidden);
  }
  const sections = [...document.querySelectorAll("details.section")], left = sections.filter(section => !section.hidden);
  if (changed.length) left.forEach((section, at) => { section.open = at < 3; });
  for (const task of document.querySelectorAll("details.task")) {
    task.hidden = !task.querySelector("details.section:not([hidden])");
    if (changed.length) task.open = !!task.querySelector("details.section:not([hidden])[open]");
  }
  const told = document.getElementById("matches");
  if (told) told.textContent = changed.length ? `${left.length} of ${sections.length} sets of samples have an arm that fits.` : "";
  const words = new URLSearchParams(changed).toString();
  history.replaceState(null, "", words ? `#${words}` : location.pathname);
};
if (filters) {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const field = filters.elements[name];
    if (field?.type === "checkbox") field.checked = true; else if (field) field.value = value;
  }
  filters.addEventListener("input", filter);
  filters.addEventListener("reset", () => setTimeout(filter));
  filters.addEventListener("submit", event => event.preventDefault());
  if (location.hash.includes("=")) filter();
}

// -- samples ----------------------------------------------------------------------------------------------------------

const compare = document.getElementById("compare");

const side = (arm, answer, outputs) => {
  const block = make("div"), head = make("strong", arm.name);
  block.append(head);
  if (!answer) block.append(" ", make("small", "did not have this sample"));
  else {
    block.append(" ", make("small", answer[0] === null ? "no score" : `score ${answer[0].toFixed(1)}`));
    if (outputs) block.append(answer[1] === null ? make("p", "no output is stored", "none") : make("pre", answer[1]));
  }
  return block;
};
if (compare) {
  const { arms, samples, outputs, pairs, measure } = JSON.parse(document.getElementById("data").textContent);
  const { left, right, differ } = compare.elements;
  for (const select of [left, right]) arms.forEach((arm, index) => select.append(new Option(arm.name, index)));
  right.value = Math.min(1, arms.length - 1);
  for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
    if (arms.some(arm => arm.name === value)) compare.elements[name].value = arms.findIndex(arm => arm.name === value);
  const verdicts = { better: "Better, significantly", worse: "Worse, significantly", "not shown": "No difference shown", "not tested": "Not tested" };
  const against = (one, two) => {
    const turn = one < two ? 1 : -1, found = pairs[Math.min(one, two)]?.[Math.abs(one - two) - 1];
    if (one === two) return "";
    if (!found) return `${arms[one].name} and ${arms[two].name} share too few samples to be tested.`;
    const [mean, low, high, n, says] = found, ends = turn > 0 ? [low, high] : [-high, -low];
    const [shift, ...both] = [turn * mean, ...ends].map(end => end.toFixed(measure.digits));
    const turned = turn > 0 ? says : { better: "worse", worse: "better" }[says] ?? says;
    return `${arms[one].name} against ${arms[two].name}, by ${measure.name}: ${shift} ${measure.unit} ahead`
      + ` (95 % interval ${both.join(" to ")}) over ${n} samples. ${verdicts[turned]}.`;
  };
  const show = () => {
    const chosen = [left, right].map(select => Number(select.value));
    document.getElementById("pair").textContent = against(...chosen);
    const kept = samples.filter(({ arms: answers }) => {
      const [one, two] = chosen.map(index => answers[index]?.[0]);
      return !differ.checked || one !== two;
    });
    document.getElementById("samples").replaceChildren(...kept.map(sample => {
      const block = make("div", "", "sample"), pair = make("div", "", "pair");
      block.append(make("h3", sample.id), make("small", sample.group));
      if (sample.prompt) block.append(make("pre", sample.prompt, "prompt"));
      if (sample.expected !== null) block.append(make("p", `Expected: ${sample.expected}`));
      pair.append(...chosen.map(index => side(arms[index], sample.arms[index], outputs)));
      block.append(pair);
      return block;
    }), ...(kept.length ? [] : [make("p", "No sample on which the scores of the two differ.")]));
  };
  compare.addEventListener("input", show);
  show();
}

// A link to a part of a page opens what is folded there, and a print has all of it.
const reveal = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
if (!filters) { addEventListener("hashchange", reveal); reveal(); }
addEventListener("beforeprint", () => document.querySelectorAll("details.task, details.section").forEach(part => { part.open = true; }));
