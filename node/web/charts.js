// The curves. A chart is made anew when its series change, or when the colours do.

import uPlot from "./vendor/uplot.js";
import { byId } from "./dom.js";

const HEIGHT = 240;
const POINTS = 600;
const KINDS = 24;
const PHASES = ["generate", "score", "share", "update"];

const charts = new Map();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const cycle = (place) => colour(`c${place % 10}`);

function draw(id, names, series, data) {
  const box = byId(id);
  const known = charts.get(id);
  const key = JSON.stringify([names, colour("text")]);
  if (known?.key === key) {
    known.plot.setData(data);
    return;
  }
  known?.plot.destroy();
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
  const plot = new uPlot(
    {
      width: Math.max(200, box.clientWidth),
      height: HEIGHT,
      scales: { x: { time: false }, y: { range: (u, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.05 : 1] } },
      axes: [{ ...axis, label: "round", labelSize: 20 }, { ...axis, size: 50 }],
      series: [{ label: "round" }, ...series],
      cursor: { drag: { x: true, y: false } },
    },
    data,
    box,
  );
  charts.set(id, { key, plot });
}

export function watchSizes() {
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const width = Math.max(200, target.clientWidth);
      const chart = charts.get(target.id)?.plot;
      if (chart && chart.width !== width) chart.setSize({ width, height: HEIGHT });
    }
  });
  for (const id of ["chart-reward", "chart-kinds", "chart-time"]) observer.observe(byId(id));
}

/** Mean over the `span` values before and with each place; null where there is none. */
function smooth(values, span) {
  const means = [];
  let sum = 0;
  let count = 0;
  values.forEach((value, place) => {
    if (value !== null) [sum, count] = [sum + value, count + 1];
    const left = values[place - span] ?? null;
    if (left !== null) [sum, count] = [sum - left, count - 1];
    means.push(count > 0 ? sum / count : null);
  });
  return means;
}

const spanOf = (rounds) => Math.max(5, Math.round(rounds.length / 40));

export function drawReward(rounds, evaluations) {
  const numbers = rounds.map((round) => round.round);
  const own = rounds.map((round) => round.reward_local);
  const external = rounds.map((round) => round.reward_external);
  const names = ["own", "own, mean"];
  const series = [
    { label: "own", stroke: `${colour("c0")}66`, width: 1, points: { show: rounds.length < 60, fill: colour("card") } },
    { label: "own, mean", stroke: colour("c0"), width: 2.5, points: { show: false } },
  ];
  const columns = [own, smooth(own, spanOf(rounds))];
  if (external.some((value) => value !== null)) {
    names.push("external");
    series.push({ label: "of others, mean", stroke: colour("c1"), width: 2, points: { show: false } });
    columns.push(smooth(external, spanOf(rounds)));
  }
  const place = new Map(numbers.map((number, index) => [number, index]));
  const points = evaluations.filter((one) => place.has(one.round));
  const k = points[points.length - 1]?.k;
  const held = [["greedy", "held out, greedy", "c2"], ["sampled", "held out, sampled", "c3"], ["pass_k", `held out, pass@${k}`, "c4"]];
  for (const [name, label, tone] of points.length ? held : []) {
    const column = numbers.map(() => null);
    for (const one of points) column[place.get(one.round)] = one[name];
    names.push(label);
    series.push({ label, stroke: colour(tone), width: 1.5, dash: [6, 4], spanGaps: true, points: { show: true, size: 7, fill: colour("card") } });
    columns.push(column);
  }
  draw("chart-reward", names, series, [numbers, ...columns]);
}

export function drawKinds(rounds) {
  const known = rounds.filter((round) => Object.keys(round.kinds).length);
  const kinds = [...new Set(known.flatMap((round) => Object.keys(round.kinds)))].sort().slice(0, KINDS);
  const numbers = known.map((round) => round.round);
  const series = kinds.map((kind, place) => ({
    label: kind,
    stroke: cycle(place),
    width: 2,
    dash: place >= 10 ? [5, 3] : undefined,
    spanGaps: true,
    points: { show: false },
  }));
  const columns = kinds.map((kind) => smooth(known.map((round) => round.kinds[kind] ?? null), spanOf(known)));
  draw("chart-kinds", kinds, series, [numbers, ...columns]);
}

/** Rounds in at most POINTS bins: the means of the phases. */
function binned(rounds) {
  const size = Math.ceil(rounds.length / POINTS);
  const bins = [];
  for (let start = 0; start < rounds.length; start += size) {
    const part = rounds.slice(start, start + size);
    const mean = (phase) => part.reduce((sum, round) => sum + round[`seconds_${phase}`], 0) / part.length;
    bins.push({ round: part[part.length - 1].round, seconds: PHASES.map(mean) });
  }
  return bins;
}

/** Stacked: each column is the sum up to its phase, and the tallest is painted first. */
export function drawTime(rounds) {
  const bins = binned(rounds);
  const order = PHASES.map((_, place) => PHASES.length - 1 - place);
  const columns = order.map((place) => bins.map((bin) => bin.seconds.slice(0, place + 1).reduce((sum, s) => sum + s, 0)));
  const series = order.map((place) => ({
    label: PHASES[place],
    stroke: cycle(place),
    fill: cycle(place),
    width: 1,
    points: { show: false },
    value: (u, value, column, row) => (row === null || !bins[row] ? "–" : bins[row].seconds[place].toFixed(2)),
  }));
  // The legend reads the bins of the latest call.
  const known = charts.get("chart-time");
  if (known) known.plot.series.slice(1).forEach((one, place) => { one.value = series[place].value; });
  draw("chart-time", PHASES, series, [bins.map((bin) => bin.round), ...columns]);
}
