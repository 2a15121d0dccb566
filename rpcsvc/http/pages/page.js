// Keeps the page of an order up to date in place, copies, and takes the order's secret out of the
// address. Without it the page works all the same: it reloads itself, and addresses can be selected.
"use strict";
(() => {
  const EVERY_MS = 5000;
  const AFTER_FAILURE_MS = 15000;
  const root = document.documentElement;
  const parts = () => document.querySelectorAll("main > section[id]");
  const before = new Map([...parts()].map((part) => [part.id, part.outerHTML]));
  const main = () => document.querySelector("main");

  root.classList.add("js");
  if (navigator.clipboard) root.classList.add("can-copy");

  // /orders/{orderId}#session=... : a fragment is never sent anywhere. It is taken out of the
  // address, so that nobody passes it on with the link.
  const given = /^#session=([0-9a-fA-F-]{36})$/.exec(location.hash);
  const secret = given ? given[1] : "";
  if (secret) history.replaceState(null, "", location.pathname + location.search);
  const fill = () => {
    const field = document.getElementById("secret");
    if (field && secret && !field.value) field.value = secret;
  };
  fill();

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    const said = document.getElementById("said");
    const label = button.textContent;
    said.textContent = button.textContent = said.dataset.copied;
    setTimeout(() => {
      said.textContent = "";
      button.textContent = label;
    }, 1500);
  });

  const update = async () => {
    const answer = await fetch(location.pathname, { cache: "no-store", credentials: "omit" });
    if (!answer.ok) throw new Error(String(answer.status));
    // The policy of this page would complain of another one's styles.
    const text = (await answer.text()).replace(/<style>[^]*?<\/style>/g, "");
    const fresh = new DOMParser().parseFromString(text, "text/html");
    const now = fresh.querySelector("main");
    root.style.setProperty("--left", now.dataset.left);
    let changed = false;
    for (const part of now.querySelectorAll(":scope > section[id]")) {
      const html = part.outerHTML;
      if (before.get(part.id) === html) continue;
      before.set(part.id, html);
      document.getElementById(part.id).replaceWith(part);
      changed = true;
    }
    main().dataset.live = now.dataset.live;
    document.querySelector("footer > p:nth-of-type(2)").replaceWith(
      fresh.querySelector("footer > p:nth-of-type(2)"),
    );
    if (changed) {
      document.title = fresh.title;
      document.getElementById("said").textContent = document.querySelector("h1").textContent;
      fill();
    }
  };

  const stale = document.getElementById("stale");
  let timer = 0;
  const turn = async () => {
    clearTimeout(timer);
    if (main().dataset.live !== "yes" || document.hidden) return;
    let wait = EVERY_MS;
    try {
      await update();
      stale.hidden = true;
    } catch {
      stale.hidden = false;
      wait = AFTER_FAILURE_MS;
    }
    timer = setTimeout(turn, wait);
  };
  document.addEventListener("visibilitychange", turn);
  if (stale) timer = setTimeout(turn, EVERY_MS);
})();
