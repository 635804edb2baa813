// Requests to the node, with the token if it asks for one. The token is kept for this window alone.

const KEY = "swarmnode-token";
const BASE = "api/v1/";

export class Unauthorized extends Error {}

const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem(KEY, given);
  history.replaceState(null, "", location.pathname);
}

export const setToken = (token) => sessionStorage.setItem(KEY, token.trim());

function headers() {
  const token = sessionStorage.getItem(KEY);
  return { "X-Swarmnode": "1", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
}

async function ask(path, options = {}) {
  const response = await fetch(BASE + path, { cache: "no-store", headers: headers(), ...options });
  if (response.status === 401) throw new Unauthorized();
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `status ${response.status}`);
  }
  return response;
}

export const get = async (path) => (await ask(path)).json();
export const post = async (path, body) =>
  (await ask(path, { method: "POST", ...(body === undefined ? {} : { body: JSON.stringify(body) }) })).json();

/** Tell `on(kind, data)` each event until the stream ends. Throws when it breaks. */
export async function listen(on) {
  const response = await ask("events");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n");
      const kind = lines.find((line) => line.startsWith("event: "));
      const data = lines.find((line) => line.startsWith("data: "));
      if (kind && data) on(kind.slice(7), JSON.parse(data.slice(6)));
    }
  }
}
