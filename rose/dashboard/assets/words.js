// Figures in words, and colours by name.

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

export function figure(unit, value) {
  if (value == null) return "–";
  if (unit === "ms") return (1000 * value).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0) + " ms";
  if (unit === "%") return (100 * value).toFixed(value > 0 && value < 0.095 ? 1 : 0) + " %";
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 }) + (unit ? " " + unit : "");
}

export function tick(unit, value) {
  if (unit === "ms") return +(1000 * value).toPrecision(4) + "";
  if (unit === "%") return +(100 * value).toFixed(1) + " %";
  return value >= 10000 ? value / 1000 + "k" : +value.toPrecision(6) + "";
}

export const clock = (atS, seconds) =>
  new Date(1000 * atS).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined, hour12: false });

export function seconds(s) {
  if (s < 10) return Math.max(0, s).toFixed(1) + " s";
  if (s < 100) return s.toFixed(0) + " s";
  return s < 5400 ? Math.round(s / 60) + " min" : (s / 3600).toFixed(1) + " h";
}

export const count = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));
