-- Replaces the record of an idle session. ARGV: session id, tenant, the record as it was read, new record and chain.
local record = owned(ARGV[1], ARGV[2])
if not record then return {'missing'} end
-- The same call may be repeated, because the first answer may be lost.
if record == ARGV[4] then return {'ok'} end
-- A running turn will write its own chain back. A turn that has ended since the record was read has done so.
if redis.call('EXISTS', turn_key(ARGV[1])) == 1 then return {'busy'} end
if record ~= ARGV[3] then return {'busy'} end
redis.call('HSET', session_key(ARGV[1]), 'record', ARGV[4], 'chain', ARGV[5])
count_bytes(ARGV[1], ARGV[2])
return {'ok'}
