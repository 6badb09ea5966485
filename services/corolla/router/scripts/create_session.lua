-- ARGV: session id, tenant, record, chain, ttl in ms, how many sessions the tenant may have or 0.
-- The same call again is no error: the first answer may be lost.
local key = session_key(ARGV[1])
if redis.call('EXISTS', key) == 1 then
  if owned(ARGV[1], ARGV[2]) == ARGV[3] then return found(ARGV[1], ARGV[3]) end
  return {'taken'}
end
local most, sessions = tonumber(ARGV[6]), tenant_key(ARGV[2])
local now = string.format('%.0f', now_ms())
if most > 0 and redis.call('ZCOUNT', sessions, now, '+inf') >= most then return {'quota'} end
-- First, since a full store refuses only a script's first write.
redis.call('HSET', key, 'tenant', ARGV[2], 'record', ARGV[3], 'chain', ARGV[4])
redis.call('DEL', turn_key(ARGV[1]))
redis.call('ZREMRANGEBYSCORE', SESSIONS, '-inf', now)
redis.call('ZREMRANGEBYSCORE', sessions, '-inf', now)
keep(ARGV[1], tonumber(ARGV[5]))
return found(ARGV[1], ARGV[3])
