-- Takes an adapter out. ARGV: name. Returns 1; 0 where there is none.
local before = redis.call('HGET', ADAPTERS, ARGV[1])
if not before then return 0 end
take_out(ARGV[1], before)
changed('adapters')
return 1
