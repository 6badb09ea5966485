-- Lists the servers, and removes those that were silent for a lease. So the first snapshot after an expiry makes it a
-- change. ARGV: session id or '', lease in ms, 1 to list adapters, too.
-- Returns version, number of blocks, id of the last change, each server's id and description, the session's chain, each
-- adapter's name and entry, and each removed adapter.
local SUSPECTED = string.char(0x28, 1)    -- PlacedServer.suspected = true, serialised
local DOUBTED = string.char(0x30, 1)      -- PlacedServer.doubted = true, serialised
local DRAINING = string.char(0x18, 3)     -- PlacedServer.state = DRAINING, serialised; the last value of a field wins
local now = now_ms()
local silent_since = now - tonumber(ARGV[2])
local live = {}
local entries = redis.call('HGETALL', SERVERS)
-- The script writes nothing for a model without servers, because callers may ask for any name.
local may_expire = #entries > 0 and listening_since(tonumber(ARGV[2])) < silent_since
for index = 1, #entries, 2 do
  local server_id, entry = entries[index], entries[index + 1]
  local lease = redis.call('HGET', LEASES, server_id)
  local heard = tonumber(redis.call('ZSCORE', HEARD, server_id) or '0')
  -- The clock was set back, so silence is counted from now on.
  if heard > now then redis.pcall('ZADD', HEARD, string.format('%.0f', now), server_id) end
  if lease and not (may_expire and heard < silent_since) then
    -- In Protocol Buffers, two serialised halves of a message, one after the other, are the whole message.
    local marks = redis.call('MGET', suspect_key(server_id), withheld_key(server_id), doubted_key(address_of(entry)))
    local suspected = (marks[1] or marks[2] == 'unready') and SUSPECTED or ''
    local leaving = marks[2] == 'leaving' and DRAINING or ''
    local doubted = marks[3] and DOUBTED or ''
    live[#live + 1] = server_id
    live[#live + 1] = description_of(entry) .. string.sub(lease, 2) .. suspected .. doubted .. leaving
  else
    remove(server_id, entry)
    changed(server_id)
  end
end
if #live > 0 then
  for _, key in ipairs({PLACEMENT, CHANGES, SERVERS, ADDRESSES, LEASES, HEARD}) do
    redis.call('PEXPIRE', key, FORGOTTEN_AFTER_MS)
  end
end
if #entries > 0 then redis.call('PEXPIRE', LISTENING, FORGOTTEN_AFTER_MS) end
local last = redis.call('XREVRANGE', CHANGES, '+', '-', 'COUNT', 1)
local chain = false
if ARGV[1] ~= '' then chain = redis.call('HGET', session_key(ARGV[1]), 'chain') end
local adapters = {}
local removed = {}
if ARGV[3] == '1' then
  adapters = redis.call('HGETALL', ADAPTERS)
  removed = redis.call('HGETALL', REMOVED_ADAPTERS)
end
return {version(), redis.call('HGET', PLACEMENT, 'blocks') or '0', last[1] and last[1][1] or '0-0', live, chain,
  adapters, removed}
