"use strict";
// Names and reasons are untrusted: all text is inserted as text, never as markup.
const EVERY = 2000, PATIENCE = 5000;
const { ceil, floor, max, min, round } = Math;
const $ = id => document.getElementById(id);
let report, known, drawn, lost, ahead = 0;

const fill = (element, parts) => {
  element.append(...parts.flat(2).filter(part => part || part === 0));
  return element;
};
const put = (element, ...parts) => fill((element.replaceChildren(), element), parts);
const h = (name, ...parts) => fill(document.createElement(name), parts);
const shape = (name, attributes, ...parts) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return fill(made, parts);
};
const styled = (kind, element) => (element.className = kind, element);
// Screen readers announce each write to a live region.
const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };

// The agent's time.
const now = () => Date.now() + ahead;
const at = moment => moment ? Date.parse(moment) : null;
const day = moment => new Date(moment).toISOString().replace("T", " ").replace(/\..*/, "Z");
const span = length => {
  const all = floor(Math.abs(length) / 1000);
  const [d, hours, m] = [floor(all / 86400), floor(all / 3600) % 24, floor(all / 60) % 60];
  return d ? `${d}d ${hours}h` : hours ? `${hours}h ${m}m` : m ? `${m}m ${all % 60}s` : `${all}s`;
};
const AWAY = {
  expiry: away => away > 0 ? `(${span(away)} left)` : `(EXPIRED ${span(away)} ago)`,
  renewal: away => away > 0 ? `(in ${span(away)})` : `(due for ${span(away)})`,
  past: away => `(${span(away)} ago)`,
};
const tick = () => document.querySelectorAll("small[data-at]").forEach(one =>
  say(one, AWAY[one.dataset.away](at(one.dataset.at) - now())));
const when = (moment, away) => {
  if (!moment) return null;
  const time = h("time", day(moment)), far = h("small");
  time.dateTime = moment;
  Object.assign(far.dataset, { at: moment, away });
  return [time, " ", far];
};
const past = moment => when(moment, "past"), next = moment => when(moment, "renewal");

const rows = facts => facts.filter(([, value]) => value && value.length !== 0).map(([name, value]) => [h("dt", name), h("dd", value)]);
const kind = state => ({ ok: "good", failing: "warn", rejected: "warn", overdue: "warn" })[state] || "bad";
const bad = text => text && styled("bad", h("span", text));
const code = text => text && h("code", text);
const trouble = one => [["last error", bad(one.error)], ["failing since", past(one.failing_since)], ["next try", next(one.next_try)]];
const holders = ({ version, streams, holding }) => {
  const none = holding.reduce((rest, one) => rest - one.streams, streams);
  const parts = holding.map(one => `${one.streams} with ${one.version === version ? "this version" : one.version} (${one.nodes.join(", ")})`);
  if (none > 0) parts.push(`${none} with none`);
  return [streams, ...parts].join(", ").replace(",", ":");
};
const card = one => {
  const { key_pair: pair, trust_bundle: bundle, rejection } = one;
  return h("article", h("h3", one.name, " ", styled(`word ${kind(one.state)}`, h("span", one.state.toUpperCase())),
    one.origin && h("small", ` from ${one.origin}`)), h("dl", rows([
    ...trouble(one),
    ["last rejection", rejection && bad(`version ${rejection.version} by ${rejection.node}: ${rejection.reason}`)],
    ["identity", pair?.identity || pair?.names],
    ["valid until", when(one.not_after, "expiry")],
    ["next renewal", next(one.renews)],
    ["received", past(one.received)],
    ["serial", code(pair?.serial)],
    ["key", pair?.key_type],
    ["issuer", pair?.issuer],
    ["roots", bundle?.roots.map(root =>
      h("div", `${root.subject}, ${root.key_type}, serial `, code(root.serial), ", until ", when(root.not_after, "expiry")))],
    ["CRLs", bundle && report.crls && `${bundle.crls}`],
    ["version", code(one.version)],
    ["streams", holders(one)],
  ])));
};

const ask = async () => {
  try {
    const answer = await fetch("v1/status", { signal: AbortSignal.timeout(PATIENCE) });
    if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
    report = await answer.json();
    ahead = at(report.now) - Date.now();
    lost = "";
    const text = JSON.stringify({ ...report, now: "" });
    if (text !== known) show(known = text);
    draw();
    tick();
  } catch (error) {
    lost ||= `No answer from the agent since ${day(now())} (${error.message}). Retrying every 2 s.` +
      (report ? " Below is its last known state." : "");
  }
  const state = !report ? "UNKNOWN" : report.ready ? "READY" : "NOT READY";
  say($("ready"), lost && report ? `WAS ${state}` : state);
  $("ready").className = `word ${report?.ready && !lost ? "good" : "bad"}`;
  document.title = `${lost ? "NO ANSWER" : state} – attache`;
  say($("gone"), lost);
  document.body.classList.toggle("stale", !!lost);
  setTimeout(ask, EVERY);
};
setInterval(tick, 1000);
