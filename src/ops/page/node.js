"use strict";
// What is wrong comes first. Beyond so many rows, the filter finds the others.
const ORDER = ["expired", "missing", "not ready", "rejected", "failing", "overdue", "ok"], MOST = 250;
let opened, full, listed;

const word = one => one.state !== "ok" ? one.state : !one.ready ? "not ready" : one.overdue ? "overdue" : "ok";
const badge = state => styled(`word ${kind(state)}`, h("span", state.toUpperCase()));
const labelled = (text, act) => Object.assign(h("button", text), { type: "button", onclick: act });

// The workload that is opened, in full.
const look = async () => {
  const name = opened;
  try {
    const answer = await fetch(`v1/status?workload=${encodeURIComponent(name)}`, { signal: AbortSignal.timeout(PATIENCE) });
    const found = answer.ok ? await answer.json() : { error: await answer.text() };
    if (name === opened) full = found;
  } catch (error) {
    if (name === opened) full ??= { error: error.message };
  }
  list();
};
const choose = name => {
  [opened, full] = [name === opened ? null : name, null];
  opened ? look() : list();
};

const details = one => {
  const cell = h("td", full?.error && bad(full.error), !full && "…",
    h("dl", rows([...trouble(one), ["socket", one.socket], ["file", one.file]])), full?.secrets?.map(card));
  cell.colSpan = 5;
  return h("tr", cell);
};
const row = ([state, one]) => {
  const is = one.workload === opened, name = labelled(one.workload, () => choose(one.workload));
  name.setAttribute("aria-expanded", is);
  const cells = [name, badge(state), [one.identity, one.error && h("div", bad(one.error))], when(one.not_after, "expiry"), `${one.streams}`];
  return [h("tr", cells.map(cell => h("td", cell))), is && details(one)];
};

const list = () => {
  const wanted = $("filter").value.trim().toLowerCase(), state = wanted.match(/^state:(.*)/)?.[1];
  const has = ([word, one]) => state ? word === state :
    [word, one.workload, one.identity, one.error].some(text => text?.toLowerCase().includes(wanted));
  const all = report.workloads.map(one => [word(one), one]), found = all.filter(has);
  found.sort(([a, one], [b, other]) => ORDER.indexOf(a) - ORDER.indexOf(b) || (one.workload < other.workload ? -1 : 1));
  const shown = found.slice(0, MOST);
  say($("found"), found.length > MOST ? `the first ${MOST} of ${found.length}: filter for the others` : `${found.length} of ${all.length}`);
  const text = JSON.stringify([shown, opened, full && { ...full, now: "" }]);
  if (text === listed) return;
  listed = text;
  const focused = document.activeElement?.closest("tbody button")?.textContent;
  put($("rows"), shown.flatMap(row));
  if (focused) [...document.querySelectorAll("tbody button")].find(one => one.textContent === focused)?.focus();
  tick();
};

const show = () => {
  const states = report.workloads.map(word), { ca, mistakes } = report;
  put($("missing"), report.directory_error && h("li", report.directory_error),
    mistakes.map(one => h("li", h("b", one.workload), `: ${one.errors.join("; ")}`)));
  put($("about"), rows([
    ["version", `${report.version}, process ${report.pid}`],
    ["up since", past(report.started)],
    ["CA", [...new Set([ca.provider, ...ca.addresses])].join(", ").replace(",", " at")],
    ["no answer from", report.hanging.map(one =>
      h("div", bad(`the file system of ${one.path}`), ", since ", past(one.since)))],
  ]));
  const filter = text => () => { $("filter").value = text; list(); };
  put($("summary"), styled("good", labelled(`${states.length} in all`, filter(""))), ORDER.map(state => {
    const count = states.filter(one => one === state).length;
    return count > 0 && styled(kind(state), labelled(`${count} ${state}`, filter(`state:${state}`)));
  }));
};
const draw = () => opened ? look() : list();
$("filter").oninput = list;
ask();
