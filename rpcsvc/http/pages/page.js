// Keeps the page of an order up to date in place, copies, and takes the order's secret out of the
// address. Without it the page works all the same: it reloads itself, and addresses can be selected.
"use strict";
(() => {
  const EVERY_MS = 5000;
  const WITH_STREAM_MS = 15000;
  const AFTER_FAILURE_MS = 15000;
  const STREAM_REFUSED_MS = 60000;
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

  // Its owner may keep the link. The forms of this page lead back to it with the secret, as they
  // would without a script.
  if (secret) {
    const link = `${location.origin}${main().dataset.path}#session=${secret}`;
    const owner = document.getElementById("owner");
    owner.hidden = false;
    document.getElementById("owner-link").textContent = link;
    owner.querySelector("button").dataset.copy = link;
    document.addEventListener("submit", ({ target }) => {
      target.action = new URL(`#session=${secret}`, target.action);
    });
  }

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

  // The countdown and its bar start from --left, so they start again when it is set.
  const setTimeLeft = (seconds) => {
    root.style.setProperty("--left", seconds);
    for (const animation of document.getAnimations()) animation.currentTime = 0;
  };

  // Replaces a part of the page. What is open in it stays open, and what has the focus keeps it: its
  // counterpart is the one of the same name. Where there is none, the heading gets the focus.
  const nameOf = (element) => element.id || element.ariaLabel || element.textContent;
  const namesakes = (part, element) =>
    [...part.querySelectorAll(element.localName)].filter((each) => nameOf(each) === nameOf(element));
  const replace = (shown, part) => {
    const fresh = part.querySelectorAll("details");
    shown.querySelectorAll("details").forEach(({ open }, at) => {
      if (fresh[at]) fresh[at].open = open;
    });
    const focused = shown.contains(document.activeElement) ? document.activeElement : null;
    const at = focused ? namesakes(shown, focused).indexOf(focused) : 0;
    shown.replaceWith(part);
    if (!focused) return;
    const heading = document.querySelector("h1");
    heading.tabIndex = -1;
    (namesakes(part, focused)[at] ?? heading).focus({ preventScroll: true });
  };

  const update = async () => {
    const answer = await fetch(main().dataset.path, { cache: "no-store", credentials: "omit" });
    if (!answer.ok) throw new Error(String(answer.status));
    // The policy of this page would complain of another one's styles.
    const text = (await answer.text()).replace(/<style>[^]*?<\/style>/g, "");
    const fresh = new DOMParser().parseFromString(text, "text/html");
    const now = fresh.querySelector("main");
    setTimeLeft(now.dataset.left);
    let changed = false;
    for (const part of now.querySelectorAll(":scope > section[id]")) {
      const html = part.outerHTML;
      if (before.get(part.id) === html) continue;
      before.set(part.id, html);
      const shown = document.getElementById(part.id);
      // A form that is being filled in stays, with what is wrong about it.
      if (shown.querySelector("form") && part.querySelector("form")) continue;
      replace(shown, part);
      changed = true;
    }
    main().dataset.live = now.dataset.live;
    main().dataset.events = now.dataset.events;
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
  let isUpdating = false;
  let isOutdated = false;
  const turn = async () => {
    isOutdated = true;
    if (isUpdating) return;
    isUpdating = true;
    clearTimeout(timer);
    let failed = false;
    while (isOutdated && mayChange()) {
      isOutdated = false;
      try {
        await update();
        failed = false;
      } catch {
        failed = true;
      }
    }
    stale.hidden = !failed;
    isUpdating = false;
    goOn(failed);
  };
  const mayChange = () => main().dataset.live === "yes" && !document.hidden;

  // Each event of the order updates the page at once. A poll does the rest: what is no event, such
  // as confirmations, and all of it where the service has no room for one more stream.
  let stream = null;
  let streamNotBefore = 0;
  const goOn = (failed) => {
    if (!mayChange()) {
      if (stream) stream.close();
      stream = null;
      return;
    }
    if (!stream && Date.now() >= streamNotBefore) listen();
    timer = setTimeout(turn, failed ? AFTER_FAILURE_MS : stream ? WITH_STREAM_MS : EVERY_MS);
  };
  const listen = () => {
    stream = new EventSource(main().dataset.events);
    stream.addEventListener("message", turn);
    stream.addEventListener("error", ({ target }) => {
      if (target !== stream || target.readyState !== EventSource.CLOSED) return;
      stream = null;
      streamNotBefore = Date.now() + STREAM_REFUSED_MS;
      turn();
    });
  };

  if (stale) {
    document.addEventListener("visibilitychange", () => (document.hidden ? goOn() : turn()));
    goOn();
  }
})();
