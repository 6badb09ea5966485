-- Deletes a session. ARGV: session id, tenant, name of this call. Returns its chain and its epoch.
-- A repeated call gets the same answer, because the first may be lost, and only this answer names the hops to free.
if not owned(ARGV[1], ARGV[2]) then
  local deleted = redis.call('HMGET', deleted_key(ARGV[3]), 'chain', 'epoch')
  if not deleted[1] then return {'missing'} end
  return {'ok', deleted[1], deleted[2]}
end
if redis.call('EXISTS', turn_key(ARGV[1])) == 1 then return {'busy'} end
local kept = redis.call('HMGET', session_key(ARGV[1]), 'chain', 'epoch')
local chain, epoch = kept[1] or '', kept[2] or '0'
-- This write comes first and frees memory, so a full Redis allows it. The text of the session is not kept.
redis.call('DEL', session_key(ARGV[1]))
redis.call('HSET', deleted_key(ARGV[3]), 'chain', chain, 'epoch', epoch)
redis.call('PEXPIRE', deleted_key(ARGV[3]), REPEATED_WITHIN_MS)
forget(ARGV[1], ARGV[2])
return {'ok', chain, epoch}
