// One task at a time: shown, answered, scored.

import { Unauthorized, post, setToken } from "./client.js";
import { byId, el, setText } from "./dom.js";

let task = null;

function notice(text) {
  byId("notice").hidden = !text;
  setText("notice", text ?? "");
}

function login() {
  const form = byId("login");
  form.hidden = false;
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      setToken(byId("token").value);
      form.hidden = true;
      resolve();
    }, { once: true });
  });
}

async function ask(path, body) {
  for (;;) {
    try {
      return await post(path, body);
    } catch (error) {
      if (!(error instanceof Unauthorized)) throw error;
      await login();
    }
  }
}

/** Do it with the buttons off; what goes wrong is said. */
async function busy(action) {
  for (const id of ["send", "next"]) byId(id).disabled = true;
  try {
    await action();
    notice(null);
  } catch (error) {
    notice(error.message);
  }
  byId("next").disabled = false;
  byId("send").disabled = task === null;
}

async function draw() {
  task = null;
  task = await ask("contribute/task");
  setText("kind", task.kind);
  setText("prompt", task.prompt);
  setText("tries", `${task.tries} tries`);
  byId("example").hidden = !task.example;
  setText("example-prompt", task.example?.prompt ?? "");
  setText("example-answer", task.example?.answer ?? "");
  byId("text").value = "";
  byId("text").focus();
}

function tell(text, judged) {
  byId("said").prepend(el("li", {},
    el("span", { class: judged.right ? "right" : "wrong" }, judged.right ? "right " : `${judged.reward.toFixed(2)} `), text));
}

byId("answer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value;
  busy(async () => {
    const judged = await ask("contribute/answer", { id: task.id, answer: text });
    tell(text, judged);
    setText("tries", `${judged.tries} tries`);
    if (judged.over) await draw();
  });
});

byId("next").addEventListener("click", () => busy(async () => {
  if (task) {
    const left = task;
    task = null;
    // It may be gone already; there is another in any case.
    await ask("contribute/next", { id: left.id }).catch(() => null);
  }
  await draw();
}));

// Enter sends, as in a chat; with Shift it is a line break.
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!byId("send").disabled) byId("answer").requestSubmit();
  }
});

busy(draw);
