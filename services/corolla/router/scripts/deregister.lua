-- Removes a server at once. ARGV: server id, who asks or ''. Returns 1; 0 when it was not there; 3 when somebody else
-- registered it.
local entry = redis.call('HGET', SERVERS, ARGV[1])
if not entry then return 0 end
if is_anothers(ARGV[1], ARGV[2]) then return 3 end
remove(ARGV[1], entry)
changed(ARGV[1])
return 1
