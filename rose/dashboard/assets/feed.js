// What the server has told this page so far: one whole state, then increments of it.
// Times are of the server's clock, in seconds; `nowS` carries it on between two looks.

const POINTS_MAX = 4000;
const STALE_AFTER_S = 5;
const RETRY_MS = 2000;

export const feed = { connected: false, heardMs: null, atS: null, state: null, times: [], values: new Map() };

export const ageS = () => (feed.heardMs == null ? Infinity : (performance.now() - feed.heardMs) / 1000);
export const nowS = () => (feed.atS == null ? 0 : feed.atS + ageS());

// "live", "reconnecting" for as long as what is shown is fresh, "stale" from then on.
export function badge() {
  if (feed.heardMs != null && ageS() > STALE_AFTER_S) return "stale";
  return feed.connected && feed.state ? "live" : feed.state ? "reconnecting" : "connecting";
}

function heard(atS) {
  feed.connected = true;
  feed.heardMs = performance.now();
  feed.atS = atS;
}

function whole(told) {
  feed.state = told.state;
  feed.times = told.times;
  feed.values = new Map(Object.entries(told.values));
  heard(told.at_s);
}

function look(told) {
  if (!feed.state) return;
  const { services = {}, ...sections } = told.state;
  const entries = Object.entries({ ...feed.state.services, ...services }).filter(([, entry]) => entry);
  feed.state = { ...feed.state, ...sections, services: Object.fromEntries(entries.sort(([a], [b]) => (a < b ? -1 : 1))) };
  const gaps = feed.times.map(() => null);
  feed.times.push(told.at_s);
  for (const id of Object.keys(told.values)) if (!feed.values.has(id)) feed.values.set(id, [...gaps]);
  for (const [id, column] of feed.values) column.push(told.values[id] ?? null);
  if (feed.times.length > POINTS_MAX) {
    feed.times.shift();
    for (const [id, column] of feed.values) {
      column.shift();
      // What has said nothing within all of that is gone for good.
      if (!(id in told.values) && column.every((value) => value == null)) feed.values.delete(id);
    }
  }
  heard(told.at_s);
}

// `changed` is called whenever there is something new to show.
export function listen(changed) {
  const source = new EventSource("/api/events");
  source.addEventListener("whole", (event) => { whole(JSON.parse(event.data)); changed(); });
  source.addEventListener("look", (event) => { look(JSON.parse(event.data)); changed(); });
  source.onerror = () => {
    feed.connected = false;
    source.close();
    setTimeout(() => listen(changed), RETRY_MS);
    changed();
  };
}
