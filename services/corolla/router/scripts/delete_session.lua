-- ARGV: session id, tenant.
local record = owned(ARGV[1], ARGV[2])
if not record then return {'missing'} end
if redis.call('EXISTS', turn_key(ARGV[1])) == 1 then return {'busy'} end
local reply = found(ARGV[1], record)
redis.call('DEL', session_key(ARGV[1]))
redis.call('ZREM', SESSIONS, ARGV[1])
return reply
