// Numbers, sizes, durations and times as texts.

export const NONE = "n/a";

const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

function known(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

/** 1,234,567 */
export function count(value) {
  return known(value) ? whole.format(value) : NONE;
}

/** 12.3 k, in four characters or so */
export function short(value) {
  if (!known(value)) return NONE;
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= limit) return digits(value / (unit === "k" ? 1e3 : limit)) + " " + unit;
  }
  return Math.abs(value) < 10 && value % 1 ? value.toFixed(1) : whole.format(value);
}

function digits(value) {
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** 52.4 MB */
export function bytes(value) {
  if (!known(value)) return NONE;
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (Math.abs(value) >= limit) return digits(value / limit) + " " + unit;
  }
  return whole.format(value) + " B";
}

/** 340 ms, 12.3 s, 4 m 10 s, 3 h 5 m, 2 d 4 h */
export function duration(ms) {
  if (!known(ms) || ms < 0) return NONE;
  if (ms < 1) return ms === 0 ? "0 ms" : ms.toFixed(1) + " ms";
  if (ms < 1000) return ms.toFixed(0) + " ms";
  if (ms < 59_950) return (ms / 1000).toFixed(1) + " s";
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return Math.floor(seconds / 60) + " m " + (seconds % 60) + " s";
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1440) return Math.floor(minutes / 60) + " h " + (minutes % 60) + " m";
  return Math.floor(minutes / 1440) + " d " + (Math.floor(minutes / 60) % 24) + " h";
}

/** 37 % */
export function percent(share) {
  return known(share) ? Math.round(share * 100) + " %" : NONE;
}

function two(value) {
  return String(value).padStart(2, "0");
}

/** 2026-01-31 23:59:59, of the reader's time zone */
export function moment(ms, precise = false) {
  if (!known(ms) || ms < 0) return NONE;
  const d = new Date(ms);
  const day = d.getFullYear() + "-" + two(d.getMonth() + 1) + "-" + two(d.getDate());
  return day + " " + clock(ms) + (precise ? "." + String(d.getMilliseconds()).padStart(3, "0") : "");
}

/** 23:59:59 */
export function clock(ms) {
  if (!known(ms)) return NONE;
  const d = new Date(ms);
  return two(d.getHours()) + ":" + two(d.getMinutes()) + ":" + two(d.getSeconds());
}

/** "one finding", "2 findings" */
export function plural(number, one, many = one + "s") {
  return number === 1 ? "1 " + one : count(number) + " " + many;
}
