-- Orders a server to hold another span, if the placement is still the one that this was decided on and no move is under
-- way. ARGV: expected version, server id, span, ms in which it must be back, whether blocks without a server need it (0 or
-- 1), ms for which moves without such a need have to wait afterwards. Returns 1 if ordered.
local entry = redis.call('HGET', SERVERS, ARGV[2])
if version() ~= ARGV[1] or not entry or redis.call('EXISTS', ORDER) == 1 then return 0 end
if ARGV[5] == '0' and redis.call('EXISTS', PAUSE) == 1 then return 0 end
redis.call('HSET', ORDER, 'server', ARGV[2], 'address', address_of(entry), 'span', ARGV[3], 'version', ARGV[1])
redis.call('PEXPIRE', ORDER, ARGV[4])
redis.call('SET', PAUSE, '1', 'PX', ARGV[6])
return 1
