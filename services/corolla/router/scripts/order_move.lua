-- Orders a server to move to another span, if the placement has the expected version and no other move is ordered.
-- ARGV: expected version, server id, span, ms in which the server must be back, 1 if the move covers uncovered blocks
-- or else 0, ms for which later moves with 0 must wait, 1 if the server waits for no client or else 0, ms for which
-- routers must have listened for heartbeats. Returns 1 if ordered.
local entry = redis.call('HGET', SERVERS, ARGV[2])
if version() ~= ARGV[1] or not entry or redis.call('EXISTS', ORDER) == 1 then return 0 end
-- After a loss of data, those servers are listed first that send the most heartbeats: the others are not lost.
local listened_ms = tonumber(ARGV[8])
if listened_ms > 0 and now_ms() - listening_since(listened_ms) < listened_ms then return 0 end
-- While the servers stay the same, the wait doubles with each move: fluctuating speeds must not keep servers moving.
local addresses = redis.call('HKEYS', ADDRESSES)
table.sort(addresses)
local among, pause_ms = table.concat(addresses, ' '), tonumber(ARGV[6])
local last = redis.call('HMGET', PATIENCE, 'among', 'ms')
if ARGV[5] == '0' and last[1] == among then
  if redis.call('EXISTS', PAUSE) == 1 then return 0 end
  pause_ms = math.min(2 * (tonumber(last[2]) or pause_ms), FORGOTTEN_AFTER_MS)
end
redis.call('HSET', ORDER, 'server', ARGV[2], 'address', address_of(entry), 'span', ARGV[3], 'version', ARGV[1], 'change',
  last_change(), 'at_once', ARGV[7])
redis.call('PEXPIRE', ORDER, ARGV[4])
if pause_ms > 0 then
  redis.call('SET', PAUSE, '1', 'PX', pause_ms)
  redis.call('HSET', PATIENCE, 'among', among, 'ms', pause_ms)
  redis.call('PEXPIRE', PATIENCE, 2 * FORGOTTEN_AFTER_MS)
end
return 1
