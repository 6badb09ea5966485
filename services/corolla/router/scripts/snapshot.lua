-- Lists the servers that may differ from what the caller has read, or all of them where it cannot know. It removes the
-- servers that were silent for a lease, so the first snapshot after an expiry makes it a change.
-- ARGV: lease in ms; of the caller's last snapshot: the id of the last change ('0-0': none), the version, and the time;
-- then the ids of servers that are to be listed in any case.
-- Returns version, number of blocks, id of the last change, the time, 1 if all servers are listed, each listed server's
-- id, description and the ms until a mark on it ends (0: it has none), the ids of the servers that are gone, and each
-- adapter's name and entry and each removed adapter, or false for both if no adapter changed.
local SUSPECTED = string.char(0x28, 1)    -- PlacedServer.suspected = true, serialised
local DOUBTED = string.char(0x30, 1)      -- PlacedServer.doubted = true, serialised
local DRAINING = string.char(0x18, 3)     -- PlacedServer.state = DRAINING, serialised; the last value of a field wins
local lease_ms = tonumber(ARGV[1])
local now = now_ms()
local silent_since = now - lease_ms
-- The script writes nothing for a model without servers, because callers may ask for any name.
local is_known = redis.call('EXISTS', SERVERS) == 1
local may_expire = is_known and listening_since(lease_ms) < silent_since
local listed, ids = {}, {}

local function list(server_id)
  if not listed[server_id] then ids[#ids + 1] = server_id end
  listed[server_id] = true
end

-- If the clock was set back, heartbeats since the last snapshot cannot be found.
local changes = ARGV[2] ~= '0-0' and tonumber(ARGV[4]) <= now and changes_since(ARGV[2], ARGV[3])
local have_adapters_changed = not changes
if not changes then
  for _, server_id in ipairs(redis.call('HKEYS', SERVERS)) do list(server_id) end
else
  for _, change in ipairs(changes) do
    if change.server_id == 'adapters' then have_adapters_changed = true else list(change.server_id) end
  end
  for _, server_id in ipairs(redis.call('ZRANGEBYSCORE', HEARD, ARGV[4], '+inf')) do list(server_id) end
  for index = 5, #ARGV do list(ARGV[index]) end
  if may_expire then
    local least = string.format('(%.0f', silent_since)
    for _, server_id in ipairs(redis.call('ZRANGEBYSCORE', HEARD, '-inf', least)) do list(server_id) end
  end
end

local live, gone = {}, {}
for _, server_id in ipairs(ids) do
  local entry, lease = redis.call('HGET', SERVERS, server_id), redis.call('HGET', LEASES, server_id)
  local heard = tonumber(redis.call('ZSCORE', HEARD, server_id) or '0')
  -- The clock was set back, so silence is counted from now on.
  if heard > now then redis.pcall('ZADD', HEARD, string.format('%.0f', now), server_id) end
  if entry and lease and not (may_expire and heard < silent_since) then
    -- In Protocol Buffers, two serialised halves of a message, one after the other, are the whole message.
    local keys = {suspect_key(server_id), withheld_key(server_id), doubted_key(address_of(entry))}
    local marks, ends_ms = redis.call('MGET', unpack(keys)), 0
    for index, key in ipairs(keys) do
      local left_ms = marks[index] and math.max(1, redis.call('PTTL', key)) or 0
      if left_ms > 0 and (ends_ms == 0 or left_ms < ends_ms) then ends_ms = left_ms end
    end
    local suspected = (marks[1] or marks[2] == 'unready') and SUSPECTED or ''
    local leaving = marks[2] == 'leaving' and DRAINING or ''
    local doubted = marks[3] and DOUBTED or ''
    live[#live + 1] = server_id
    live[#live + 1] = description_of(entry) .. string.sub(lease, 2) .. suspected .. doubted .. leaving
    live[#live + 1] = ends_ms
  else
    gone[#gone + 1] = server_id
    if entry then
      remove(server_id, entry)
      changed(server_id)
    end
  end
end
if #live > 0 then
  for _, key in ipairs({PLACEMENT, CHANGES, SERVERS, ADDRESSES, LEASES, HEARD}) do
    redis.call('PEXPIRE', key, FORGOTTEN_AFTER_MS)
  end
end
if is_known then redis.call('PEXPIRE', LISTENING, FORGOTTEN_AFTER_MS) end
local adapters = have_adapters_changed and redis.call('HGETALL', ADAPTERS)
local removed = have_adapters_changed and redis.call('HGETALL', REMOVED_ADAPTERS)
return {version(), redis.call('HGET', PLACEMENT, 'blocks') or '0', last_change(),
  string.format('%.0f', now), changes and 0 or 1, live, gone, adapters, removed}
