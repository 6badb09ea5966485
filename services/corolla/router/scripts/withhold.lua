-- Withholds sessions from a server for a while, or ends that. Returns 1 if this is a change.
-- ARGV: server id, the reason 'leaving', 'unready' or '', ms.
if redis.call('HEXISTS', SERVERS, ARGV[1]) == 0 then return 0 end
local before = redis.call('GET', withheld_key(ARGV[1])) or ''
-- A leaving server stays leaving, even if another router has not noticed it yet.
if before == 'leaving' and ARGV[2] ~= 'leaving' then return 0 end
if ARGV[2] == '' then
  redis.call('DEL', withheld_key(ARGV[1]))
else
  redis.call('SET', withheld_key(ARGV[1]), ARGV[2], 'PX', ARGV[3])
end
if before == ARGV[2] then return 0 end
changed(ARGV[1], STATE)
return 1
