// The feed of rollouts. It rests while one is open.

import { byId, el, short } from "./dom.js";

function dots(rollout) {
  const best = (sample) => el("span", { class: sample.reward > 0 ? "right" : "wrong" }, sample.reward > 0 ? "●" : "○");
  return el("span", { class: "dots", title: "one dot a completion; filled: rewarded" }, ...rollout.completions.slice(0, 64).map(best));
}

function answer(sample) {
  const text = (sample.text || "(nothing)") + (sample.cut ? " … (cut here)" : "") + (sample.finished ? "" : " … (not finished)");
  return el("div", { class: "answer" },
    el("span", { class: `score ${sample.reward > 0 ? "right" : "wrong"}`, title: `advantage ${sample.advantage.toFixed(3)}` }, sample.reward.toFixed(2)),
    el("pre", {}, text));
}

function group(rollout) {
  const origin = rollout.own ? el("span", { class: "tag" }, "own") : el("span", { class: "tag other", title: rollout.origin }, short(rollout.origin));
  const summary = el("summary", {},
    el("span", { class: `score ${rollout.reward > 0 ? "right" : "wrong"}` }, rollout.reward.toFixed(2)),
    dots(rollout), origin, el("span", { class: "tag" }, rollout.kind),
    el("span", { class: "tag" }, `round ${rollout.round}`),
    rollout.refused ? el("span", { class: "tag bad" }, "left aside") : null,
    rollout.used_in.length ? el("span", { class: "tag" }, `trained in ${rollout.used_in.join(", ")}`) : null,
    el("span", { class: "prompt" }, rollout.prompt));
  const details = el("details", { class: "group" }, summary);
  const fill = () => {
    if (details.childElementCount === 1) {
      details.append(el("pre", {}, rollout.prompt + (rollout.prompt_cut ? " … (cut here)" : "")), ...rollout.completions.map(answer));
    }
  };
  details.addEventListener("toggle", () => {
    if (details.open) fill();
  });
  return details;
}

export function showRollouts(rollouts) {
  const box = byId("rollouts");
  if (!rollouts.length) box.replaceChildren(el("p", { class: "empty" }, "None yet."));
  else box.replaceChildren(...rollouts.map(group));
}

export function offerKinds(kinds) {
  const select = byId("rollouts-kind");
  const known = new Set([...select.options].map((option) => option.value));
  for (const kind of kinds) if (!known.has(kind)) select.append(el("option", { value: kind }, kind));
}

export function query() {
  const kind = byId("rollouts-kind").value;
  const filter = new URLSearchParams({ limit: "12", origin: byId("rollouts-origin").value, ...(kind ? { kind } : {}) });
  return `rollouts?${filter}`;
}
