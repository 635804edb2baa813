// Wires the panels to the node: one stream of events, and a look at the rest every few seconds while the page is seen.

import { drawKinds, drawReward, drawTime, watchSizes } from "./charts.js";
import { Unauthorized, get, listen, post, setToken } from "./client.js";
import { byId, setText, short } from "./dom.js";
import { addLog, clearLog, showContribution, showFirsts, showRejected, showResources } from "./panels.js";
import { offerKinds, query, showRollouts } from "./rollouts.js";
import { showSwarm } from "./swarm.js";

const PAGE = 1000;
const DRAW_MS = 500;
const RETRY_MS = 2000;

const now = { status: null, swarm: null, rounds: [], evaluations: [], stale: true, fresh: true };

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function notice(text) {
  byId("notice").hidden = !text;
  setText("notice", text ?? "");
}

function showStatus(status) {
  now.status = status;
  setText("name", status.name);
  setText("round", status.goal ? `${status.round} of ${status.goal}` : status.round);
  setText("state", status.state);
  byId("state").className = `pill ${status.state}`;
  const part = status.progress?.total ? ` ${status.progress.done}/${status.progress.total} ${status.progress.unit}` : "";
  setText("phase", `${status.phase}${part}, ${status.phase_seconds.toFixed(0)} s`);
  setText("reward", status.reward_recent === null ? "–" : status.reward_recent.toFixed(3));
  setText("saved", status.saved_round ? `round ${status.saved_round}` : "nothing yet");
  setText("model", status.model ? `${status.model}, ${status.engine} on ${status.device}` : "loading");
  setText("node", short(status.node_id));
  byId("node").title = status.node_id;
  document.title = `${status.round} · ${status.name || short(status.node_id)} · swarmnode`;
  // It has neither a model nor rounds.
  if (status.state === "relaying") document.body.classList.add("relay");
  byId("contribute").hidden = status.silo;
  const halted = status.state === "paused" || status.state === "pausing";
  setText("pause", halted ? "Resume" : "Pause");
  for (const id of ["pause", "checkpoint", "stop"]) byId(id).disabled = status.state === "stopping";
}

/** Rounds at and after this one are replaced, as they are after a crash. */
function addRound(round) {
  while (now.rounds.length && now.rounds[now.rounds.length - 1].round >= round.round) now.rounds.pop();
  now.rounds.push(round);
  now.stale = now.fresh = true;
}

async function loadRounds() {
  const { first_round: first } = now.status;
  now.rounds = [];
  for (let from = first; from !== null; ) {
    const { rounds } = await get(`rounds?from=${from}&limit=${PAGE}`);
    now.rounds.push(...rounds);
    from = rounds.length === PAGE ? rounds[PAGE - 1].round + 1 : null;
  }
  now.stale = true;
}

async function loadEvaluations() {
  now.evaluations = (await get("evaluations")).evaluations;
  now.stale = true;
}

function draw() {
  if (!now.stale || document.hidden) return;
  now.stale = false;
  showRejected(now.rounds, now.swarm);
  showContribution(now.rounds, now.swarm);
  if (!now.rounds.length) return;
  drawReward(now.rounds, now.evaluations);
  drawKinds(now.rounds);
  drawTime(now.rounds);
  offerKinds(Object.keys(now.rounds[now.rounds.length - 1].kinds));
}

function onEvent(kind, data) {
  if (kind === "round") {
    addRound(data);
    setText("round", now.status?.goal ? `${data.round} of ${now.status.goal}` : data.round);
  } else if (kind === "phase") setText("phase", data.phase);
  else if (kind === "message") addLog([data]);
  else if (kind === "started") {
    now.rounds = now.rounds.filter((round) => round.round <= data.round);
    now.stale = true;
  }
}

const isReading = () => document.querySelector("#rollouts details[open]") !== null;

/** What somebody reads does not move away, unless it was another choice that brought this here. */
async function refreshRollouts(chosen) {
  const { rollouts } = await get(query());
  if (chosen || !isReading()) showRollouts(rollouts);
}

/** Run `action` every `seconds` while the page is seen; what fails is said by the stream of events. */
async function every(seconds, action) {
  for (;;) {
    if (!document.hidden && now.status) await action().catch(() => null);
    await sleep(1000 * seconds);
  }
}

function startLooking() {
  every(2, async () => showStatus(await get("status")));
  every(2, async () => {
    now.swarm = (await get("peers")).swarm;
    showSwarm(now.status, now.swarm);
    if (!now.rounds.length) now.stale = true;
  });
  every(4, async () => showResources(await get("resources")));
  every(3, async () => {
    if (!now.fresh) return;
    now.fresh = false;
    await loadEvaluations();
    showFirsts((await get("firsts")).firsts);
    if (byId("rollouts-live").checked && !isReading()) await refreshRollouts(false);
  });
  setInterval(draw, DRAW_MS);
}

async function login() {
  const form = byId("login");
  form.hidden = false;
  byId("main").hidden = true;
  await new Promise((resolve) => form.addEventListener("submit", (event) => {
    event.preventDefault();
    setToken(byId("token").value);
    resolve();
  }, { once: true }));
  form.hidden = true;
  byId("main").hidden = false;
}

async function connect() {
  showStatus(await get("status"));
  clearLog();
  // What happens meanwhile is not missed: the stream is open before the rest is loaded.
  let loaded = false;
  const early = [];
  const stream = listen((kind, data) => (loaded ? onEvent(kind, data) : early.push([kind, data])));
  stream.catch(() => null);
  addLog((await get("log")).lines);
  await Promise.all([loadRounds(), loadEvaluations()]);
  loaded = true;
  for (const [kind, data] of early) if (kind !== "message") onEvent(kind, data);
  now.fresh = true;
  notice(null);
  await stream;
}

async function follow() {
  for (;;) {
    try {
      await connect();
    } catch (error) {
      if (error instanceof Unauthorized) {
        await login();
        continue;
      }
    }
    setText("state", "no connection");
    byId("state").className = "pill gone";
    notice("The node does not answer; trying again.");
    await sleep(RETRY_MS);
  }
}

function button(id, action) {
  byId(id).addEventListener("click", async () => {
    try {
      await action();
      showStatus(await get("status"));
    } catch (error) {
      notice(error.message);
    }
  });
}

button("pause", () => post(byId("pause").textContent === "Pause" ? "pause" : "resume"));
button("checkpoint", async () => {
  await post("checkpoint");
  notice("A checkpoint is written when the round in hand is done.");
});
button("stop", async () => {
  if (confirm("Stop this node? The last finished round is saved, and `swarmnode start` goes on from there.")) await post("stop");
});
for (const id of ["rollouts-origin", "rollouts-kind"]) byId(id).addEventListener("change", () => refreshRollouts(true).catch(() => null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { now.stale = true; });
watchSizes();
startLooking();
follow();
