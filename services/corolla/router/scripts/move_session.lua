-- ARGV: session id, tenant, the record as it was read, then record and chain as they shall be.
local record = owned(ARGV[1], ARGV[2])
if not record then return {'missing'} end
-- The same call again is no error: the first answer may be lost.
if record == ARGV[4] then return {'ok'} end
-- A turn that runs will write its own chain back; one that has ended since did so.
if redis.call('EXISTS', turn_key(ARGV[1])) == 1 then return {'busy'} end
if record ~= ARGV[3] then return {'busy'} end
redis.call('HSET', session_key(ARGV[1]), 'record', ARGV[4], 'chain', ARGV[5])
count_bytes(ARGV[1], ARGV[2], record_bytes(ARGV[1]))
return {'ok'}
