// The smaller panels: first successes, rejections, contribution, resources, log.

import { byId, bytes, el, percent, short } from "./dom.js";

const LINES = 300;

export function showFirsts(firsts) {
  const box = byId("firsts");
  if (!firsts.length) {
    box.replaceChildren(el("li", { class: "empty" }, "None yet."));
    return;
  }
  box.replaceChildren(...[...firsts].reverse().map((first) => {
    let before = "by itself: no right answer of another node was here before";
    if (first.forerunner) {
      const who = short(first.forerunner.origin);
      before = first.forerunner.trained_in
        ? `after training on a right answer of ${who} in round ${first.forerunner.trained_in}`
        : `a right answer of ${who} was here since round ${first.forerunner.round}, and had not been trained on`;
    }
    return el("li", {}, el("strong", {}, `✦ ${first.kind}`), ` in round ${first.round}`, el("div", { class: "hint" }, before));
  }));
}

function bar(name, value, most, text) {
  return [el("span", {}, name), el("progress", { max: Math.max(1, most), value }), el("span", { class: "number" }, text)];
}

/** Before the first round, and in a node without any: what was refused since the start. */
export function showRejected(rounds, swarm) {
  const counts = new Map(rounds.length ? [] : Object.entries(swarm?.rejected ?? {}));
  for (const round of rounds) {
    for (const [reason, count] of Object.entries(round.rejected)) counts.set(reason, (counts.get(reason) ?? 0) + count);
    if (round.gate_refused) counts.set("likelihood gate", (counts.get("likelihood gate") ?? 0) + round.gate_refused);
  }
  const rows = [...counts].sort((a, b) => b[1] - a[1]);
  const box = byId("rejected");
  if (!rows.length) box.replaceChildren(el("p", { class: "empty" }, "Nothing was rejected."));
  else box.replaceChildren(el("div", { class: "meter" }, ...rows.flatMap(([reason, count]) => bar(reason, count, rows[0][1], count))));
}

export function showContribution(rounds, swarm) {
  const sum = (key) => rounds.reduce((total, round) => total + (round[key] ?? 0), 0);
  const own = sum("local_groups");
  const external = sum("external_groups");
  const ours = swarm?.contribution;
  const pairs = [
    ["own groups sampled", own],
    ["batches sent to others", sum("batches_sent")],
    ["own groups sent, over all restarts", ours ? ours.sent : "–"],
    ["trained on by peers, as they say", ours ? `${ours.trained} times by ${ours.trained_by}` : "–"],
    ["admitted by peers, as they say", ours ? `${ours.admitted} times by ${ours.admitted_by}` : "–"],
    ["batches that came", sum("batches_received")],
    ["groups of others admitted, since the start", swarm ? `${swarm.admitted} of ${swarm.groups}` : "–"],
    ["groups of others trained on", external],
    ["share of others in training", own + external ? percent(external / (own + external)) : "–"],
  ];
  byId("contribution").replaceChildren(...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

export function showResources(now) {
  const used = now.memory_total - now.memory_available;
  const full = now.disk_total - now.disk_free;
  const most = Math.max(...now.processes.map((process) => process.memory), 1);
  byId("resources").replaceChildren(el("div", { class: "meter" },
    ...bar(`processors (${now.cpus})`, now.cpu_percent, 100, `${now.cpu_percent.toFixed(0)} %`),
    ...bar("memory", used, now.memory_total, `${bytes(now.memory_available)} free`),
    ...bar("disk", full, now.disk_total, `${bytes(now.disk_free)} free`),
    ...now.processes.flatMap((process) => bar(`${process.name} ${process.pid}`, process.memory, most,
      `${bytes(process.memory)}, ${process.cpu_percent.toFixed(0)} % of a core`))));
}

function line(entry) {
  const time = new Date(1000 * entry.time).toLocaleTimeString();
  return el("div", { class: entry.level }, `${time} ${entry.text}`);
}

export function addLog(entries) {
  const box = byId("log");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
  box.append(...entries.map(line));
  while (box.childElementCount > LINES) box.firstElementChild.remove();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

export function clearLog() {
  byId("log").replaceChildren();
}
