"use strict";
// What was served when, until the next value came, and when renewals failed.
const lane = one => {
  const bars = [], fails = [];
  for (const event of report.events.filter(event => event.name === one.name)) {
    const from = at(event.at), list = event.what === "served" ? bars : fails, last = list.at(-1);
    if (last) last.until ??= from;
    if (event.what !== "recovered") list.push({ ...event, from });
  }
  return { one, bars, fails };
};
const STEPS = [1, 5, 15, 60, 300, 900, 3600, 10800, 43200, 86400, 604800, 2592e3, 31536e3, 31536e4];

const draw = () => {
  const HIGH = 66, lanes = report.secrets.filter(({ name }) => ["default", "ROOTCA"].includes(name)).map(lane);
  const width = max(280, $("line").clientWidth), height = lanes.length * HIGH + 22, present = now();
  // Two lifetimes back, up to the expiry; or the chosen range.
  const main = lanes.map(({ one }) => one).filter(one => one.not_after).sort((a, b) => at(a.not_after) - at(b.not_after))[0];
  const life = main ? at(main.not_after) - at(main.received) : 3600e3;
  const back = $("back").value * 60e3;
  const start = max(present - (back || 2 * life), min(present - 1000, at(report.events[0]?.at) ?? present));
  const end = back ? present + back / 5 : max(at(main?.not_after), present) + life / 15;
  const x = moment => 4 + (min(max(moment, start), end) - start) / (end - start) * (width - 8);
  const key = [known, width, round(x(present)), round(end / 1000), back].join();
  if (key === drawn) return;
  drawn = key;

  const parts = [], names = [], summary = [];
  const upright = (kind, where) => shape("line", { class: kind, x1: where, x2: where, y1: 0, y2: height - 18 });
  const box = (kind, from, until, y, high, text) => from < end && until > start && parts.push(shape("rect",
    { class: kind, x: x(from), width: max(2, x(until) - x(from)), y, height: high, rx: 2 }, shape("title", {}, text)));
  const mark = (kind, moment, y, sign, text) => moment >= start && moment <= end && parts.push(shape("text",
    { class: `mark ${kind}`, x: x(moment), y, "text-anchor": "middle" }, sign, shape("title", {}, `${text} ${day(moment)}`)));
  const step = 1000 * (STEPS.find(one => one * 1000 >= (end - start) * 110 / width) || STEPS.at(-1));
  for (let moment = ceil(start / step) * step; moment < end; moment += step) {
    const text = day(moment).slice(step < 108e5 ? 11 : step < 864e5 ? 5 : 0, step < 60e3 ? 19 : step < 864e5 ? 16 : 10);
    parts.push(upright("grid", x(moment)), x(moment) < width - 70 && shape("text", { class: "quiet", x: x(moment) + 3, y: height - 5 }, text));
  }
  lanes.forEach(({ one, bars, fails }, number) => {
    const top = number * HIGH, y = top + 24, until = one.not_after ? `, until ${day(one.not_after)}` : "";
    names.push(shape("text", { x: 4, y: top + 12 }, one.name, " ", shape("tspan", { class: kind(one.state) }, one.state),
      shape("tspan", { class: "quiet" }, until)));
    bars.forEach((bar, index) => {
      const text = `${bar.text}, from ${day(bar.from)} until ${day(bar.not_after)}`, low = y + index % 2 * 5, ends = at(bar.not_after);
      box("valid", bar.from, ends, low, 12, text);
      box("served", bar.from, min(ends, bar.until ?? present), low, 12, text);
      if (one.rejection?.version === bar.version) box("rejected", bar.from, ends, low - 1, 14, `rejected: ${one.rejection.reason}`);
    });
    bars.slice(1).forEach(bar => mark("renewed", bar.from, y + 13, "◆", "renewed"));
    for (const fail of fails) {
      box("failing", fail.from, fail.until ?? present, y + 22, 5, fail.text);
      mark("bad failed", fail.from, y + 29, "×", fail.text);
    }
    if (one.renews) mark("renewal", at(one.renews), y - 1, "▼", "planned renewal");
    parts.push(shape("line", { class: "grid", x1: 0, x2: width, y1: top + HIGH - 4, y2: top + HIGH - 4 }));
    summary.push(`${one.name} is ${one.state}${until}, with ${fails.length} failed renewals.`);
  });
  parts.push(upright("now", x(present)));
  put($("line"), shape("svg", { role: "img", viewBox: `0 0 ${width} ${height}`, height,
    "aria-label": `${summary.join(" ")} The table below lists all events.` }, parts, names));
};

const show = () => {
  const { ca, output, command } = report, hook = output?.hook;
  put($("missing"), report.missing.map(({ name, reason }) => h("li", h("b", name), `: ${reason}`)));
  put($("about"), rows([
    ["version", `${report.version}, process ${report.pid}`],
    ["up since", past(report.started)],
    ["CA", [...new Set([ca.provider, ...ca.addresses])].join(", ").replace(",", " at")],
    ["signed by", ca.members.length > 1 && ca.signed_by],
    ["failing CAs", ca.members.filter(one => one.error).map(one =>
      h("div", one.address, ", since ", past(one.failing_since), ": ", bad(one.error)))],
    ["socket", report.socket],
    ["command", command && [`${command.program} is ${command.state}`, ...command.epochs.map(one => h("div",
      `epoch ${one.epoch}, process ${one.pid}, ${one.state} since `, past(one.since))),
    h("div", `${command.restarts.files + command.restarts.crash} restarts`, command.last_exit && `, last exit: ${command.last_exit.reason}`),
    command.secrets?.map(one => h("div", `${one.name}: ${one.has}`)), bad(command.error || command.files_error)]],
    ["next start", next(command?.next_start)],
    ["no answer from", report.hanging.map(one =>
      h("div", bad(`the file system of ${one.path}`), ", since ", past(one.since)))],
    ["CRL file", bad(report.crls?.error)],
    ["state", bad(report.state?.error)],
    ["last refusal", report.refusal],
  ]));
  put($("secrets"), report.secrets.map(card));
  $("output").hidden = !output;
  put($("files"), output && rows([
    ...trouble(output),
    ["valid until", when(output.not_after, "expiry") || "nothing written yet"],
    ["disk", output.hanging && bad("does not respond")],
    ["hook", hook ? [bad(hook.error), ", since ", past(hook.failing_since), ", next try ",
      next(hook.next_try)] : output.hook_running && "running"],
  ]));
  put($("rows"), report.events.toReversed().map(({ at, name, what, text, not_after: end }) => h("tr",
    [past(at), name, [h("b", what), text && `: ${text}`], end && day(end)].map(cell => h("td", cell)))));
};

addEventListener("resize", $("back").onchange = () => report && draw());
ask();
