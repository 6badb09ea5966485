// Who holds which block. Pure.

const SERVING = new Set(["ready", "draining"]);

/**
 * The server that counts as each block's holder: one through which answers go, best the one that held it before, else
 * any that is ready; null where nobody does.
 *
 * @param placement as the service sends it
 * @param before names by block, as this function gave them last
 */
export function holdersOf(placement, before = []) {
  return Array.from({ length: placement.num_blocks }, (_, block) => {
    const weight = (server) =>
      4 * (server.answers > 0) + 2 * (server.name === before[block]) + (server.state === "ready");
    const holding = placement.servers.filter(({ blocks: [first, end], state }) =>
      SERVING.has(state) && first <= block && block < end);
    return holding.sort((one, other) => weight(other) - weight(one))[0]?.name ?? null;
  });
}

/** Runs of blocks with the same holder, in order: `{first, end, holder}`. */
export function runsOf(holders) {
  const runs = [];
  holders.forEach((holder, block) => {
    const last = runs.at(-1);
    if (last && last.holder === holder) last.end = block + 1;
    else runs.push({ first: block, end: block + 1, holder });
  });
  return runs;
}
