// Everything shown goes through here. Texts may be of strangers: they become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with properties (class, title, ...) and children: strings become text. */
export function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") node.className = value;
    else node[key] = value;
  }
  node.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

export function svg(name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

export function setText(id, text) {
  const node = byId(id);
  if (node.textContent !== String(text)) node.textContent = text;
}

/** The end of a peer id, which is what tells one from another. Whatever else groups come from has a name with a colon. */
export const short = (peer) => (peer.includes(":") ? peer : peer.slice(-8));

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count.toFixed(count < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}
