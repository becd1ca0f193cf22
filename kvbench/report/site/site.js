// Sorts tables, filters the leaderboard, and sets samples side by side. All that it reads stands in the page.
"use strict";

const number = (row, name) => {
  const cell = row.querySelector(`td[data-name="${name}"][data-value]`);
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

// -- the leaderboard --------------------------------------------------------------------------------------------------

const board = document.getElementById("board"), filters = document.getElementById("filters");

const fits = (row, wanted) => {
  const most = (name, limit) => {
    const value = number(row, name);
    return !limit || (value !== null && value <= Number(limit));
  };
  const words = wanted.method.trim().toLowerCase();
  return (!wanted.task || row.dataset.task === wanted.task) && (!wanted.model || row.dataset.model === wanted.model)
    && (!wanted.whose || row.dataset.whose === wanted.whose)
    && (!wanted.budget || row.dataset.budget === wanted.budget || row.dataset.budget === "-")
    && (!words || `${row.dataset.method} ${row.cells[0].textContent}`.toLowerCase().includes(words))
    && most(wanted.index ? "index_share" : "device_share", wanted.share) && most("device_kv_bytes", wanted.memory) && most("tpot_ms_p50", wanted.time);
};
// Nearer to full attention, or with the better score; then with less memory.
const order = (one, two) => {
  const kl = number(one, "kl_mean") !== null && number(two, "kl_mean") !== null;
  const ahead = kl ? number(one, "kl_mean") - number(two, "kl_mean") : number(two, "score") - number(one, "score");
  return ahead || (number(one, "device_kv_bytes") ?? Infinity) - (number(two, "device_kv_bytes") ?? Infinity);
};
// A number as its cell shows it, without interval and marks; "" where the table has none.
const shown = (row, name) => row.querySelector(`td[data-name="${name}"][data-value]`)?.firstChild.textContent.trim() ?? "";

const places = new Map(), counts = {};  // of each row among those of its panel, as the page has them
for (const row of board?.tBodies[0].rows ?? []) places.set(row, (counts[row.dataset.panel] = (counts[row.dataset.panel] ?? -1) + 1));

const best = rows => {
  const box = document.getElementById("best"), list = make("ul"), panels = new Map();
  for (const row of rows) if (row.dataset.choice !== undefined) {
    const { panel } = row.dataset;
    panels.set(panel, [...(panels.get(panel) ?? []), row]);
  }
  for (const own of panels.values()) {
    const [first, ...others] = own.sort(order), item = make("li"), name = number(first, "kl_mean") !== null ? "kl_mean" : "score";
    if (name === "score" && number(first, name) < Number(box.dataset.least)) {
      item.append(`${first.dataset.panel}: none scores ${box.dataset.least}; the best, of ${own.length}, has ${shown(first, name)}`);
      list.append(item);
      continue;
    }
    const { pairs } = first.dataset, letters = others.map(row => pairs?.[places.get(row)]), count = letter => letters.filter(one => one === letter).length;
    const even = count("="), untested = count("?");
    const link = first.querySelector("a.method").cloneNode(true);
    const words = [
      first.dataset.budget === "-" ? "" : `C = ${first.dataset.budget}`,
      first.dataset.variant,
      name === "score" ? `score ${shown(first, name)}` : `KL ${shown(first, name)} nats`,
      shown(first, "device_kv_bytes") && `${shown(first, "device_kv_bytes")} MiB on the device`,
      shown(first, "device_share") && `${shown(first, "device_share")} % of full attention's`,
      shown(first, "index_share") && `${shown(first, "index_share")} % with its index`,
      shown(first, "tpot_ms_p50") && `${shown(first, "tpot_ms_p50")} ms / token`,
    ];
    item.append(`${first.dataset.panel}: `, link, ` ${words.filter(Boolean).join("; ")}`);
    if (others.length) item.append(" ", make("small", pairs ? `paired by sample, at 95 %: no different from ${even} of the ${others.length - untested} others that fit${untested ? ` and were tested, ${untested} were not` : ""}`
      : `too few samples to rank it among the ${others.length} others that fit`));
    list.append(item);
  }
  box.replaceChildren(make("h2", panels.size ? "First of what fits" : "Nothing fits"), list);
};
const filter = () => {
  const wanted = Object.fromEntries(new FormData(filters)), rows = [...board.tBodies[0].rows];
  for (const row of rows) row.hidden = !fits(row, wanted);
  best(rows.filter(row => !row.hidden));
  const words = new URLSearchParams(Object.entries(wanted).filter(([, value]) => value)).toString();
  history.replaceState(null, "", words ? `#${words}` : location.pathname);
};
if (board) {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
    if (filters.elements[name]?.type === "checkbox") filters.elements[name].checked = true;
    else if (filters.elements[name]) filters.elements[name].value = value;
  filters.addEventListener("input", filter);
  filters.addEventListener("reset", () => setTimeout(filter));
  filters.addEventListener("submit", event => event.preventDefault());
  filter();
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
  const verdicts = { alike: "No different by more than chance", few: "Too few samples to say", ahead: "Ahead by more than chance", behind: "Behind by more than chance" };
  const against = (one, two) => {
    const turn = one < two ? 1 : -1, found = pairs[Math.min(one, two)][Math.abs(one - two) - 1];
    if (one === two) return "";
    if (!found) return `${arms[one].name} and ${arms[two].name} share too few samples.`;
    const [mean, low, high, n, ranged, says] = found, ends = turn > 0 ? [low, high] : [-high, -low];
    const [shift, ...both] = [turn * mean, ...ends].map(end => end.toFixed(measure.digits));
    const turned = turn > 0 ? says : { ahead: "behind", behind: "ahead" }[says] ?? says;
    return `${arms[one].name} against ${arms[two].name}, by ${measure.name}: ${shift} ${measure.unit} ahead`
      + ` (${ranged ? "range" : "95 % interval"} ${both.join(" to ")}) over ${n} samples. ${verdicts[turned]}.`;
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

// A link to a part of a page opens what is folded there.
const reveal = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
if (!board) { addEventListener("hashchange", reveal); reveal(); }
