-- ARGV: session id, tenant, record, chain, ttl in ms, how many sessions the tenant may have or 0, and how many bytes or 0.
-- The same call again is no error: the first answer may be lost.
local key = session_key(ARGV[1])
if redis.call('EXISTS', key) == 1 then
  if owned(ARGV[1], ARGV[2]) == ARGV[3] then return found(ARGV[1], ARGV[3]) end
  return {'taken'}
end
local most, most_bytes = tonumber(ARGV[6]), tonumber(ARGV[7])
local now = string.format('%.0f', now_ms())
if most > 0 and redis.call('ZCOUNT', tenant_key(ARGV[2]), now, '+inf') >= most then return {'quota', 'stored_sessions'} end
if most_bytes > 0 and stored_bytes(ARGV[2]) >= most_bytes then return {'quota', 'stored_session_bytes'} end
-- First, since a full store refuses only a script's first write.
redis.call('HSET', key, 'tenant', ARGV[2], 'record', ARGV[3], 'chain', ARGV[4])
redis.call('DEL', turn_key(ARGV[1]))
redis.call('ZREMRANGEBYSCORE', SESSIONS, '-inf', now)
forget_expired(ARGV[2])
keep(ARGV[1], tonumber(ARGV[5]))
return found(ARGV[1], ARGV[3])
