-- Deletes a session. ARGV: session id, tenant, name of this call.
-- A repeated call gets the same answer, because the first may be lost, and only this answer names the hops to free.
local record = owned(ARGV[1], ARGV[2])
if not record then
  local deleted = redis.call('HMGET', deleted_key(ARGV[3]), 'record', 'epoch')
  if not deleted[1] then return {'missing'} end
  return {'ok', deleted[1], 0, 0, deleted[2] or '0', store_id()}
end
if redis.call('EXISTS', turn_key(ARGV[1])) == 1 then return {'busy'} end
local reply = found(ARGV[1], record)
redis.call('RENAME', session_key(ARGV[1]), deleted_key(ARGV[3]))
redis.call('PEXPIRE', deleted_key(ARGV[3]), REPEATED_WITHIN_MS)
redis.call('ZREM', SESSIONS, ARGV[1])
redis.call('ZREM', tenant_key(ARGV[2]), ARGV[1])
count_bytes(ARGV[1], ARGV[2], 0)
return reply
