-- Orders a server to hold another span, if the placement is still the one that this was decided on and no move is under
-- way. ARGV: expected version, server id, span, ms in which it must be back, whether blocks without a server need it (0 or
-- 1), ms for which moves without such a need have to wait afterwards. Returns 1 if ordered.
local entry = redis.call('HGET', SERVERS, ARGV[2])
if version() ~= ARGV[1] or not entry or redis.call('EXISTS', ORDER) == 1 then return 0 end
-- They wait twice as long each time, as long as the servers are the same: speeds that waver must not keep them moving.
local addresses = redis.call('HKEYS', ADDRESSES)
table.sort(addresses)
local among, pause_ms = table.concat(addresses, ' '), tonumber(ARGV[6])
local last = redis.call('HMGET', PATIENCE, 'among', 'ms')
if ARGV[5] == '0' and last[1] == among then
  if redis.call('EXISTS', PAUSE) == 1 then return 0 end
  pause_ms = math.min(2 * (tonumber(last[2]) or pause_ms), FORGOTTEN_AFTER_MS)
end
redis.call('HSET', ORDER, 'server', ARGV[2], 'address', address_of(entry), 'span', ARGV[3], 'version', ARGV[1])
redis.call('PEXPIRE', ORDER, ARGV[4])
if pause_ms > 0 then
  redis.call('SET', PAUSE, '1', 'PX', pause_ms)
  redis.call('HSET', PATIENCE, 'among', among, 'ms', pause_ms)
  redis.call('PEXPIRE', PATIENCE, 2 * FORGOTTEN_AFTER_MS)
end
return 1
