// The swarm: this node in the middle, those it is connected to around it, those it has met outside.

import { byId, duration, el, setText, short, svg } from "./dom.js";

const DRAWN = 40;
const COLUMNS = ["node", "state", "groups", "batches", "used ours", "reputation", "rejected"];
const NUMBERS = new Set(["groups", "batches", "used ours", "reputation"]);

const isBanned = (peer) => peer.banned_seconds > 0;

function order(a, b) {
  return Number(b.connected) - Number(a.connected) || b.groups - a.groups || a.peer.localeCompare(b.peer);
}

function place(index, count, radius) {
  // From the left: two or three stand beside the middle, clear of its label.
  const angle = (2 * Math.PI * index) / Math.max(1, count) - Math.PI;
  return [radius * Math.cos(angle), radius * 0.78 * Math.sin(angle)];
}

function dot(peer, x, y, most) {
  const radius = 7 + 9 * Math.sqrt(peer.groups / Math.max(1, most));
  const classes = ["peer", isBanned(peer) ? "banned" : peer.score < 0 ? "doubtful" : "", peer.connected ? "" : "away"];
  const node = svg("circle", { class: classes.join(" "), cx: x, cy: y, r: radius });
  node.append(svg("title", {}, `${peer.peer}\n${peer.groups} groups admitted, reputation ${peer.score.toFixed(1)}`));
  return [node, svg("text", { x, y: y + radius + 11 }, `${short(peer.peer)} · ${peer.groups}`)];
}

function graph(swarm, peers) {
  const box = byId("graph");
  const near = peers.filter((peer) => peer.connected).slice(0, DRAWN);
  const far = peers.filter((peer) => !peer.connected).slice(0, DRAWN - near.length);
  const most = Math.max(...peers.map((peer) => peer.groups), 1);
  const edges = [];
  const nodes = [];
  near.forEach((peer, index) => {
    const [x, y] = place(index, near.length, 120);
    edges.push(svg("line", { class: peer.in_mesh ? "edge mesh" : "edge", x1: 0, y1: 0, x2: x, y2: y }));
    nodes.push(...dot(peer, x, y, most));
  });
  far.forEach((peer, index) => nodes.push(...dot(peer, ...place(index + 0.5, far.length, 180), most)));
  box.setAttribute("viewBox", far.length ? "-210 -170 420 340" : "-165 -125 330 250");
  const self = svg("circle", { class: "self", r: 15 });
  self.append(svg("title", {}, swarm.peer_id));
  box.replaceChildren(...edges, ...nodes, self, svg("text", { y: 30 }, "this node"));
}

function row(peer) {
  const state = isBanned(peer) ? `banned ${duration(peer.banned_seconds)}` : peer.connected ? (peer.in_mesh ? "mesh" : "connected") : "away";
  const rejected = Object.entries(peer.rejected).map(([reason, count]) => `${reason} ${count}`).join(", ");
  return el("tr", {},
    el("td", { class: "mono", title: peer.peer }, short(peer.peer)), el("td", {}, state),
    el("td", { class: "number" }, peer.groups), el("td", { class: "number" }, peer.batches),
    el("td", { class: "number", title: `admitted ${peer.ours_admitted} of this node's groups, trained on ${peer.ours_trained}, as it says` }, peer.ours_trained),
    el("td", { class: "number" }, peer.score.toFixed(1)), el("td", {}, rejected || "–"));
}

export function showSwarm(status, swarm) {
  if (!swarm) {
    setText("swarm-line", status?.silo ? "This node trains alone (--silo)." : "The network is being opened.");
    byId("swarm-parts").hidden = true;
    return;
  }
  byId("swarm-parts").hidden = false;
  const lag = swarm.lag_ms;
  setText("swarm-line", `${swarm.swarm}: ${swarm.connected} connected, ${swarm.mesh} in the mesh, ${swarm.peers.length} known. ` +
    `Reachable from outside: ${swarm.reachable}. Event loop late by ${lag.p99.toFixed(0)} ms (p99).`);
  const peers = [...swarm.peers].sort(order);
  graph(swarm, peers);
  const head = COLUMNS.map((name) => el("th", { class: NUMBERS.has(name) ? "number" : "" }, name));
  byId("peers").replaceChildren(el("tr", {}, ...head), ...peers.slice(0, 200).map(row));
}
