-- Stores a new session.
-- ARGV: session id, tenant, record, chain, ttl in ms, the tenant's greatest number of sessions or 0, and of bytes or 0,
-- and everyone's greatest number of bytes or 0.
-- The same call may be repeated, because the first answer may be lost.
local key = session_key(ARGV[1])
if redis.call('EXISTS', key) == 1 then
  if owned(ARGV[1], ARGV[2]) == ARGV[3] then return found(ARGV[1], ARGV[3]) end
  return {'taken'}
end
local most = tonumber(ARGV[6])
local now = string.format('%.0f', now_ms())
if most > 0 and redis.call('ZCOUNT', tenant_key(ARGV[2]), now, '+inf') >= most then return {'quota', 'stored_sessions'} end
local refusal = refusal_of_bytes(ARGV[2], #ARGV[3] + #ARGV[4], tonumber(ARGV[7]), tonumber(ARGV[8]))
if refusal then return refusal end
-- This write comes first, because a full Redis refuses only the first write of a script.
redis.call('HSET', key, 'tenant', ARGV[2], 'record', ARGV[3], 'chain', ARGV[4])
redis.call('DEL', turn_key(ARGV[1]))
forget_expired(ARGV[2])
forget_expired(EVERYONE)
keep(ARGV[1], tonumber(ARGV[5]))
return found(ARGV[1], ARGV[3])
